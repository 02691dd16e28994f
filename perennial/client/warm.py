"""What a site's fork server imports ahead of messages (deploy/fork_server.py).

Imports alone: nothing is read, trained or drawn here, and PyTorch starts no thread, because threads do not
survive a fork.
"""

from importlib import import_module

from perennial.config.experiment import Experiment

ALWAYS = ("door", "handlers", "secure_answers", "site")
"""Modules of this room."""


def import_for(experiment: Experiment) -> None:
    """Import what answering the requests of an experiment needs."""
    from perennial.learning.site_method import SiteMethods

    for name in ALWAYS:
        import_module(f"perennial.client.{name}")
    SiteMethods.of(experiment)
    if experiment.privacy.mode == "sample":
        import_module("perennial.learning.private_training")

"""What a server gets that lies about the model, or makes a second run, to see one site's value in a sum."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from perennial.foundation.errors import PolicyRefusal, StateError
from perennial.privacy.secure.parameters import Parameters
from perennial.privacy.secure.roster import Subject
from tests.privacy.secure_sites import MaskedFederation, attempt_of, subject_of
from tests.strategies.test_secure_runs import run, serve_with


def test_sites_that_were_asked_about_different_models_open_nothing():
    """A server that shows one site another model than the rest, to see its update alone."""
    federation = MaskedFederation(5, Parameters(1))
    attempt, other = attempt_of(), Subject(1, "update", "another model")
    sessions = federation.prepared(attempt)
    members = [session.member for session in sessions.values()]
    victim = federation.names[0]
    for name, session in sessions.items():
        session.enrol(subject_of() if name == victim else other, members)
        session.mask(np.zeros(3, np.uint32))
    adverts = {name: session.advert for name, session in sessions.items()}
    votes = {
        name: session.sign(
            federation.names,
            {sender: advert.shares[name] for sender, advert in adverts.items() if name in advert.shares},
            federation.cipher[name],
            federation.identity[name],
        )
        for name, session in sessions.items()
    }
    with pytest.raises(PolicyRefusal, match="1 valid signatures"):
        sessions[victim].open(federation.names, votes)
    with pytest.raises(PolicyRefusal, match="asked with another roster or for another sum"):
        sessions[victim].enrol(other, members)


def test_run_beside_another_opens_nothing_that_the_other_one_opened(
    tmp_path: Path,
) -> None:
    """Both runs have masked the updates of the first model when one of them opens its sum. Were the other one
    to open a sum without one of the sites, the difference would be that site's update."""
    once = {"count": 1, "rounds": 1}
    run(tmp_path / "a", tasks=once)
    opened = {path.parts[-3]: path for path in (tmp_path / "a").rglob("secure/opened.json")}
    assert sorted(opened) == ["site-0", "site-1", "site-2", "site-3"]

    def fault(message: Message, node: int, kind: str) -> Message | None:
        if kind == "OpenRequest":
            for secure in (tmp_path / "b").rglob("site-*/secure"):
                if secure.parent.name in opened:
                    shutil.copy(opened[secure.parent.name], secure / "opened.json")
        return None

    with pytest.raises(StateError, match="goes into no other one"):
        serve_with(tmp_path / "b", fault, tasks=once, rounds={"deadline": 30, "max_skipped": 1})

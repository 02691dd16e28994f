"""What a hospital has approved: experiments, each as the document that was shown, with its digest.

`perennial site approve` writes one record for an app. A site runs the Perennial that it installed, and takes
the experiment from its own record, found by the digest that the run's configuration names: not from the app.
Nothing else of a run's configuration changes what a site does: a server may still choose name, runs, resume,
device and threads, of which a site uses none.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError

from perennial.config.document import read_document
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.yaml_file import parse_yaml
from perennial.foundation.errors import ConfigError, PolicyRefusal, StateError, clean_text
from perennial.foundation.plain import Block, PlainObject


class Approval(Block):
    """One approval of an experiment.

    app: folder below flower/apps, or '' for an experiment without an app. bundle: SHA-256 of the .fab file.
    experiment: digest of the document. document: what was shown, in its very bytes. manifest: written by
    0.2.0, and not read.
    """

    app: str
    bundle: str
    experiment: str = Field(min_length=1)
    document: str
    time: str
    manifest: dict[str, str] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the record's file."""
        return f"{self.experiment[:16]}-{self.bundle[:16] or 'installed'}.json"

    @property
    def title(self) -> str:
        """Name of the experiment, printable."""
        return clean_text(str(self.settings.get("name", "unnamed")), 60)

    @cached_property
    def settings(self) -> PlainObject:
        """The document's content."""
        return parse_yaml(self.document, self.name) if self.document else {}


def read_approvals(folder: Path) -> list[Approval]:
    """Every record, oldest first; none without a folder. Raises StateError naming one that is damaged."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Approval.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise StateError(
                f"{path}: no record of an approval, or one of an earlier version; remove it and approve the "
                "app again"
            ) from error
    return sorted(found, key=lambda approval: approval.time)


def find_newest_approval(approvals: Path) -> Approval | None:
    """The latest approved experiment, against which the next one is compared; None if there is none."""
    return next((found for found in reversed(read_approvals(approvals)) if found.experiment), None)


def read_approved_experiment(approval: Approval, approvals: Path, plugins: Mapping[str, str]) -> Experiment:
    """The experiment in a record. approvals: folder of records. plugins: as site.yaml names them.

    Raises ConfigError when this installation cannot run it, StateError when the record was changed.
    """
    experiment = read_document(approval.document, str(approvals / approval.name), plugins)
    if experiment.digest != approval.experiment:
        raise StateError(f"{approvals / approval.name}: was changed since the approval; approve it again")
    return experiment


def find_approved_experiment(
    settings: RunSettings, approvals: Path, plugins: Mapping[str, str]
) -> Experiment:
    """The experiment of a run, as this site approved it. approvals: folder of records.

    Raises PolicyRefusal naming the key of the run config or the experiment that was not approved.
    """
    if settings.overrides.strip():
        raise PolicyRefusal(
            f"run config: overrides: found {settings.overrides!r:.80}, allowed none: this site runs the "
            "approved experiment with the settings that it was approved with"
        )
    return load_approved_experiment(settings.digest, "run config: digest", approvals, plugins)


def load_approved_experiment(
    digest: str, where: str, approvals: Path, plugins: Mapping[str, str]
) -> Experiment:
    """The experiment with this digest, as this site approved it. where: named in errors.

    approvals: folder of records. Raises PolicyRefusal if it was not approved or cannot be run here.
    """
    known = [found for found in read_approvals(approvals) if found.experiment]
    approval = next((found for found in reversed(known) if found.experiment == digest), None)
    if approval is None:
        names = ", ".join(f"{found.title} {found.experiment:.16}" for found in known)
        raise PolicyRefusal(f"{where}: found {digest!r:.80}, approved here: {names or 'no experiment'}")
    try:
        return read_approved_experiment(approval, approvals, plugins)
    except ConfigError as error:
        raise PolicyRefusal(f"experiment: approved, and this installation cannot run it: {error}") from error

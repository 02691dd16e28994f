"""An experiment that a site has approved, without an app or a SuperNode."""

from datetime import UTC, datetime
from pathlib import Path

from perennial.config.approval import Approval
from perennial.config.document import compute_document_digest
from perennial.config.experiment import load_experiment
from perennial.config.yaml_file import parse_yaml


def approve_installed(experiment: Path, approvals: Path) -> Approval:
    """Record the approval of an experiment that a site runs without an app or SuperNode."""
    document = load_experiment(experiment).to_yaml()
    approval = Approval(
        app="",
        bundle="",
        experiment=compute_document_digest(parse_yaml(document, str(experiment))),
        document=document,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    approvals.mkdir(parents=True, exist_ok=True)
    (approvals / approval.name).write_text(approval.model_dump_json())
    return approval

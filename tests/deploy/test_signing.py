"""Apps are approved when the publisher signed exactly them, and otherwise not."""

import hashlib
import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.deploy.bundle import open_bundle, write_bundle
from perennial.deploy.federation import Federation, OperatorFolder, create_operator_folder
from perennial.deploy.keys import make_node_key, public_line
from perennial.deploy.operations import stage
from perennial.deploy.signing import check_signature, make_publisher_key, sign_app
from perennial.foundation.errors import ConfigError, StateError

EXPERIMENT = {
    "name": "signed",
    "data": {"source": "folder", "classes": ["a", "b"], "image_size": 8, "color": "gray"},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [4]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
}


@pytest.fixture
def operator(tmp_path: Path) -> OperatorFolder:
    folder = create_operator_folder(tmp_path / "federation", Federation(name="f", hosts=("localhost",)), 30)
    folder.add_site("graz", public_line(make_node_key()))
    (tmp_path / "experiment.yaml").write_text(
        yaml.safe_dump({**EXPERIMENT, "data": {**EXPERIMENT["data"], "normalise": {"mean": 0.3, "std": 0.3}}})
    )
    return folder


def joined(operator: OperatorFolder, folder: Path) -> Path:
    """A hospital's folder with the operator's newest bundle in it; the app on offer."""
    open_bundle(write_bundle(operator, "graz"), folder, None)
    (fab,) = (folder / "offered").glob("*.fab")
    return fab


def approve(folder: Path, fab: Path) -> str:
    digest = hashlib.sha256(fab.read_bytes()).hexdigest()
    command = ["site", "approve", str(fab), digest, "--site", str(folder / "site.yaml")]
    done = CliRunner().invoke(app, command)
    return f"{done.output}{done.exception or ''}"


def test_a_staged_app_is_signed_and_approved(tmp_path: Path, operator: OperatorFolder) -> None:
    assert stat.S_IMODE(operator.publisher_key.stat().st_mode) == 0o600
    stage(operator, tmp_path / "experiment.yaml", [], "")
    fab = joined(operator, tmp_path / "graz")
    check_signature(fab, tmp_path / "graz" / "publisher.pub")
    assert "approved, with signed" in approve(tmp_path / "graz", fab)
    assert not any("PRIVATE" in path.read_text(errors="replace") for path in (tmp_path / "graz").glob("pub*"))


def test_an_app_of_somebody_else_with_its_right_hash_is_refused(
    tmp_path: Path, operator: OperatorFolder
) -> None:
    """The hash agrees, because whoever made the app told it: only the key says who that was."""
    stage(operator, tmp_path / "experiment.yaml", [], "")
    fab = joined(operator, tmp_path / "graz")
    make_publisher_key(tmp_path / "other.key", tmp_path / "other.pub")
    sign_app(fab, tmp_path / "other.key")
    assert "not a signature of" in approve(tmp_path / "graz", fab)
    assert not list((tmp_path / "graz" / "flower" / "apps").iterdir())


@pytest.mark.parametrize("damage", ["app", "signature", "empty", "no signature", "no key"])
def test_what_does_not_fit_together_is_refused(tmp_path: Path, operator: OperatorFolder, damage: str) -> None:
    stage(operator, tmp_path / "experiment.yaml", [], "")
    fab = joined(operator, tmp_path / "graz")
    signature, public = fab.with_name(f"{fab.name}.sig"), tmp_path / "graz" / "publisher.pub"
    if damage == "app":
        fab.write_bytes(fab.read_bytes() + b"\0")
    elif damage in ("signature", "empty"):
        signature.write_bytes(b"" if damage == "empty" else b"A" * 88 + b"\n")
    else:
        (signature if damage == "no signature" else public).unlink()
    with pytest.raises(ConfigError, match="publisher|cannot be read"):
        check_signature(fab, public)


def test_a_newer_bundle_cannot_bring_another_publisher(tmp_path: Path, operator: OperatorFolder) -> None:
    stage(operator, tmp_path / "experiment.yaml", [], "")
    fab = joined(operator, tmp_path / "graz")
    key = (tmp_path / "graz" / "publisher.pub").read_bytes()
    for path in (operator.publisher_key, operator.publisher_public):
        path.unlink()
    make_publisher_key(operator.publisher_key, operator.publisher_public)
    sign_app(next(operator.apps.glob("*.fab")), operator.publisher_key)
    fab = joined(operator, tmp_path / "graz")
    assert (tmp_path / "graz" / "publisher.pub").read_bytes() == key
    assert "not a signature of" in approve(tmp_path / "graz", fab)


def test_a_publisher_key_is_not_overwritten_by_accident(operator: OperatorFolder) -> None:
    with pytest.raises(StateError, match="exists already"):
        make_publisher_key(operator.publisher_key, operator.publisher_public)


def test_a_federation_from_before_signatures_makes_its_key_with_the_first_one(
    tmp_path: Path, operator: OperatorFolder
) -> None:
    for path in (operator.publisher_key, operator.publisher_public):
        path.unlink()
    application = stage(operator, tmp_path / "experiment.yaml", [], "")
    assert not application.fab.with_name(f"{application.fab.name}.sig").exists()
    command = ["deploy", "sign", str(application.fab), "--folder", str(operator.path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "(new)" in done.output
    check_signature(application.fab, operator.publisher_public)

"""Every malicious app and bundle of the corpus is refused, before anything of it is unpacked or imported."""

import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from perennial.client.app import app as own_app
from perennial.config.approval import read_approvals
from perennial.config.site import SiteConfig
from perennial.deploy.application import approve, read_offer, stage_application
from perennial.deploy.pinned_app import FLOWERS, pin_client_app
from perennial.deploy.review import describe_asked
from perennial.foundation.errors import NOT_APPROVED, ConfigError, PolicyRefusal, StateError
from tests.redteam import malicious_apps as corpus


def write(folder: Path, data: bytes, name: str = "offered.fab") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.fixture
def site(tmp_path: Path) -> SiteConfig:
    return SiteConfig(site="graz", state_dir=tmp_path / "state")


@pytest.mark.parametrize(
    "made", [corpus.more_members, corpus.fewer_members, corpus.projects, corpus.documents, corpus.archives]
)
def test_every_malicious_app_is_refused(made: object, tmp_path: Path) -> None:
    before = set(sys.modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in made():  # type: ignore[operator]  # pyright: ignore
            path = write(tmp_path, data)
            assert corpus.read_app(path), f"{name}: not refused"
            path.unlink()
    assert not [*tmp_path.iterdir()], "nothing was written"
    assert not {"this", "antigravity", "evil"} & (set(sys.modules) - before), "nothing was imported"


def test_every_malicious_bundle_is_refused(tmp_path: Path) -> None:
    for name, data in corpus.bundles():
        path = write(tmp_path, data, "graz.tar.gz")
        assert corpus.read_bundle(path), f"{name}: not refused"
        path.unlink()
    assert not [*tmp_path.iterdir()], "nothing was unpacked"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_corpus_is_refused_within_the_memory_of_one_reading(tmp_path: Path) -> None:
    """Each in a process that ends at MEGABYTES more, or at a minute of the processor."""
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for made, read in (
            *((corpus.apps, corpus.read_app), (corpus.bundles, corpus.read_bundle)),
            (corpus.large_bundles, corpus.read_bundle),
        ):
            for name, data in made():
                told, _, _ = corpus.bounded(read, write(tmp_path, data, "file.fab"))
                assert told and "NOT REFUSED" not in told, f"{name}: {told or 'not refused'}"
                count += 1
    assert count >= 120


def test_an_honest_app_is_read_and_shown_from_the_bytes_that_are_recorded(
    tmp_path: Path, site: SiteConfig
) -> None:
    app = stage_application(corpus.EXPERIMENTS / "quickstart.yaml", [], "", tmp_path / "apps")
    assert corpus.read_app(app.fab) == ""
    offer = read_offer(app.fab, site)
    # the file changes after it was read: what is shown, compared and recorded is what was read
    app.fab.write_bytes(corpus.beside("evil.py"))
    approve(offer, tmp_path / "flower", tmp_path / "approvals")
    (record,) = read_approvals(tmp_path / "approvals")
    assert record.document == offer.document and record.bundle == app.digest == offer.digest
    assert record.experiment == offer.experiment.digest
    assert yaml.safe_load(record.document) == record.settings


def test_the_attacks_of_the_trial_are_refused_by_name(tmp_path: Path, site: SiteConfig) -> None:
    """A changed policy, compiled code beside it, and two experiments of one base name."""
    for name in (
        "perennial/client/policy.py",
        "perennial/client/__pycache__/policy.cpython-311.pyc",
        "perennial/experiments/nested/small.yaml",
    ):
        with pytest.raises(ConfigError, match=f"member '{name}': an app carries an experiment and no code"):
            read_offer(write(tmp_path, corpus.packed([corpus.honest()[0], (name, b"code")])), site)


def test_no_setting_of_a_stranger_writes_a_line_of_the_review(tmp_path: Path, site: SiteConfig) -> None:
    """Names are checked; a value that is shown in a difference may hold anything."""
    first = write(tmp_path, corpus.packed(corpus.honest()))
    approve(read_offer(first, site), tmp_path / "flower", tmp_path / "approvals")
    (earlier,) = read_approvals(tmp_path / "approvals")
    forged = earlier.model_copy(
        update={"document": earlier.document + 'forged: "x\\n  privacy.mode: none -> sample\\e[2K"\n'}
    )
    offer = read_offer(first, site)
    said = [*describe_asked(offer.experiment, site.policy, forged)]
    assert any("forged" in line for line in said)
    assert all(line.isprintable() for line in said)


@pytest.fixture
def flowers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of flwr-clientapp, as it was again after the test."""
    module = import_module(FLOWERS)
    for name in ("install_from_fab", "get_load_client_app_fn"):
        monkeypatch.setattr(module, name, getattr(module, name))
    return module


def traversing(approved: str) -> bytes:
    """An app with code, whose version leads from the approved app's folder into one that can be written."""
    name, project = corpus.honest()[0]
    text = project.decode().replace(
        f'version = "{corpus.VERSION}"', f'version = "{approved}/../../../state/x"'
    )
    text = text.replace("perennial.client.app:app", "evil_of_the_operator:app")
    return corpus.packed([(name, text.encode()), ("evil_of_the_operator.py", b"raise SystemExit")])


def test_an_app_that_chooses_its_own_folder_is_neither_unpacked_nor_imported(
    tmp_path: Path, site: SiteConfig, flowers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, approvals, state = tmp_path / "flower", tmp_path / "approvals", tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("FLWR_HOME", str(home))
    honest = write(tmp_path, corpus.packed(corpus.honest()))
    approval = approve(read_offer(honest, site), home, approvals)
    fab = traversing(approval.app.removeprefix("perennial.perennial."))
    flowers.install_from_fab(fab, skip_prompt=True)
    (unpacked,) = state.iterdir()
    assert (unpacked / "evil_of_the_operator.py").exists(), "Flower alone unpacks it"
    for path in [*unpacked.iterdir()]:
        path.unlink()
    unpacked.rmdir()
    pin_client_app(approvals)
    with pytest.raises(PolicyRefusal, match=NOT_APPROVED):
        flowers.install_from_fab(fab, skip_prompt=True)
    assert not [*state.iterdir()]
    flowers.install_from_fab(honest.read_bytes(), skip_prompt=True)
    load = flowers.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert load("evil/evil", "../../state", "0" * 64) is own_app
    assert "evil_of_the_operator" not in sys.modules


def test_apps_are_not_run_where_flower_unpacks_them_by_another_name(
    tmp_path: Path, flowers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(flowers, "install_from_fab")
    with pytest.raises(StateError, match="install_from_fab: missing in the installed flwr"):
        pin_client_app(tmp_path)

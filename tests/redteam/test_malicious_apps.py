"""Every malicious app and bundle of the corpus is refused, before anything of it is unpacked or imported."""

import sys
import warnings
from pathlib import Path

import pytest
import yaml

from perennial.config.approval import read_approvals
from perennial.config.site import SiteConfig
from perennial.deploy.application import approve, read_offer, stage_application
from perennial.deploy.review import describe_asked
from perennial.foundation.errors import ConfigError
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

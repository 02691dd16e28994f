"""A hospital's page; consent and the policy file."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from perennial.cli.withdraw import stop_answering
from perennial.client.activity import note_request
from perennial.client.consent import pause, read_consent, require_consent, resume, withdraw
from perennial.config.site import load_site_config
from perennial.deploy.certificates import make_authority, make_node_key, write_node_key
from perennial.deploy.supernode import ALIVE, ANSWERED
from perennial.foundation.errors import ConfigError, PolicyRefusal, StateError
from perennial.foundation.files import measure_size
from perennial.foundation.heartbeat import keep_beating, renew
from perennial.live import site_state
from perennial.live.hospital import HospitalPages
from perennial.live.site_state import ANSWERED_WITHIN, HospitalState
from perennial.live.web import list_allowed_hosts
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from tests.live.test_live_browser import FAINT, text
from tests.live_pages import ask, browser, needs_browser, served, until
from tests.run_folders import HOSTILE

RUN = "ab" * 16
SITE = """
# what may leave
site: graz
state_dir: state
policy:
  answers: [train, digest]  # digests are lent since May
  require_privacy: sample
  max_epsilon: 8.0
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    kept = tmp_path / "state" / "runs" / RUN
    kept.mkdir(parents=True)
    (kept / "exemplars").write_bytes(b"x" * 1000)
    release = Entry(
        run=RUN,
        experiment="e" * 64,
        recipient="server",
        kind="update",
        unit="sample",
        relation="add_remove",
        mechanism="gaussian",
        noise_multiplier=1.0,
        sample_rate=0.1,
        steps=20,
    )
    for _ in range(3):
        Ledger(tmp_path / "state").charge(release)
    return path


@contextmanager
def pages(site: Path) -> Iterator[str]:
    found = HospitalPages(site)
    with served(found.app(list_allowed_hosts("127.0.0.1", []))) as address:
        yield address


def test_nothing_is_shown_under_a_foreign_name_and_nothing_can_be_changed(site: Path) -> None:
    with pages(site) as address:
        assert ask(address, Host="rebound.example").status == 403
        for action in ("pause", "approve", "withdraw", ""):
            assert ask(f"{address}/{action}", {"run": RUN}, Origin=address).status == 405
        assert read_consent(site.parent / "state").paused == ""


def test_the_page_says_line_by_line_what_has_left_and_what_is_left(site: Path) -> None:
    state = site.parent / "state"
    with note_request(state, "train", run=RUN, name="skin <b>", round=3):
        pass
    with pytest.raises(PolicyRefusal), note_request(state, "evaluate", run=RUN, name="skin <b>", round=3):
        raise PolicyRefusal(HOSTILE)
    with pages(site) as address, keep_beating(state / ALIVE):
        body = ask(address).body
        assert "3 updates" in body and body.count("noise 1, 20 steps on a share of 0.1") == 3
        spent = Ledger(state).cost(1e-5, "rdp", "sample").epsilon
        assert f"{spent:.3g} of 8; {8 - spent:.3g} left" in body
        assert "skin &lt;b&gt;" in body and "<script>alert" not in body and "<img" not in body
        assert "The policy of graz refuses a request." in body
        metrics = ask(f"{address}/metrics").body
        assert 'perennial_site_supernode_up{site="graz"} 1.0' in metrics
        assert 'perennial_site_ledger_epsilon_limit{site="graz"} 8.0' in metrics


def test_connected_means_that_the_superlink_answers_the_supernode(site: Path) -> None:
    state = site.parent / "state"
    unused = "connection: {superlink: '127.0.0.1:1', ca: ca.crt, key: node.key}\n"
    site.write_text(site.read_text() + unused)
    authority = make_authority("test")
    (site.parent / "ca.crt").write_bytes(authority.certificate)
    write_node_key(make_node_key(), site.parent / "node.key")
    with pages(site) as address:

        def page() -> str:
            return ask(address).body

        assert "SuperNode does not run" in page()
        with keep_beating(state / ALIVE):
            until(lambda: "the SuperLink does not answer" in page())
            assert "127.0.0.1:1" in page(), "the obstacle is named"
            renew(state / ANSWERED)
            until(lambda: '<span class="pill running">connected</span>' in page())
            assert "127.0.0.1:1" not in page()
            old = time.time() - ANSWERED_WITHIN - 1
            os.utime(state / ANSWERED, (old, old))
            until(lambda: "graz does not reach the SuperLink." in page() and "since <time" in page())


def test_a_pause_refuses_every_request_until_the_hospital_goes_on(site: Path) -> None:
    state = site.parent / "state"
    with pages(site) as address:
        require_consent(state, RUN)
        pause(state)
        with pytest.raises(PolicyRefusal, match="this site pauses since"):
            require_consent(state, RUN)
        until(lambda: "The hospital has paused graz." in ask(address).body)
        resume(state)
        require_consent(state, RUN)


@pytest.mark.parametrize("run", ["", "..", "../..", "/etc", "AB" * 16, "cd" * 16, "\x00"])
def test_a_run_that_is_none_cannot_be_withdrawn_from(site: Path, run: str) -> None:
    with pytest.raises(StateError):
        withdraw(site.parent / "state", run)
    assert (site.parent / "state" / "ledger.jsonl").exists()


def test_a_withdrawn_run_is_removed_and_refused_for_good(site: Path) -> None:
    state = site.parent / "state"
    withdraw(state, RUN)
    assert not (state / "runs" / RUN).exists() and len(Ledger(state).read_entries()) == 3
    with pytest.raises(PolicyRefusal, match="has withdrawn from this run"):
        require_consent(state, RUN)
    require_consent(state, "cd" * 16)
    with pytest.raises(StateError):
        withdraw(state, RUN)
    with pages(site) as address:
        assert "withdrawn" in ask(address).body


def test_an_offer_that_goes_or_leads_nowhere_is_said_and_the_page_stays(site: Path) -> None:
    offered = site.parent / "offered"
    offered.mkdir()
    (offered / "skin.0123abcd.fab").write_bytes(b"none")
    (offered / "lung.4567abcd.fab").symlink_to(site.parent / "nowhere")
    with pages(site) as address:
        page = ask(address)
        assert page.status == 200 and "lung.4567abcd.fab: cannot be read: No such file" in page.body
        # the list of offers is as old as the last look
        (offered / "skin.0123abcd.fab").unlink()
        page = ask(address)
        assert page.status == 200 and "skin.0123abcd.fab: cannot be read: No such file" in page.body


def test_a_run_that_goes_while_the_page_measures_it_hides_no_other(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = site.parent / "state" / "runs" / ("cd" * 16)
    gone.mkdir()

    def measure(folder: Path) -> int:
        if folder == gone:
            shutil.rmtree(folder)
        return measure_size(folder)

    monkeypatch.setattr(site_state, "measure_size", measure)
    state = HospitalState(site)
    state.read()
    assert [kept.run for kept in state.kept] == [RUN]


@pytest.mark.parametrize("document", [None, "[1", "- 1"])
def test_a_damaged_approval_hides_nothing_else(site: Path, document: str | None) -> None:
    (site.parent / "approvals").mkdir()
    facts = {"app": "", "bundle": "c" * 64, "experiment": "e" * 64, "time": "", "document": document}
    (site.parent / "approvals" / "e.json").write_text(json.dumps(facts))
    pause(site.parent / "state")
    with pages(site) as address:
        page = ask(address)
        assert page.status == 200 and '<span class="pill paused">paused</span>' in page.body
        assert ".json: " in page.body, "the damaged record is named"
        assert ask(f"{address}/metrics").body.count('perennial_site_paused{site="graz"} 1.0') == 1


def test_a_damaged_record_of_consent_answers_nothing(tmp_path: Path) -> None:
    pause(tmp_path)
    resume(tmp_path)
    assert read_consent(tmp_path).paused == ""
    for content in (b"", b"[]", b"{", b"\xff"):
        (tmp_path / "withdrawn.json").write_bytes(content)
        with pytest.raises(StateError, match="nothing is answered"):
            require_consent(tmp_path, RUN)


@pytest.mark.parametrize(
    "answers",
    ["[train, digest]  # lent", "[digest]", "\n    - train  # yes\n    - digest\n", "[train,\n    digest]"],
)
def test_digests_are_withdrawn_and_nothing_else_of_the_file_changes(tmp_path: Path, answers: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(SITE.replace("[train, digest]  # digests are lent since May", answers))
    before = yaml.safe_load(path.read_text())
    stop_answering(path, "digest")
    after = yaml.safe_load(path.read_text())
    assert "digest" not in after["policy"].pop("answers")
    before["policy"].pop("answers")
    assert after == before and path.read_text().startswith("\n# what may leave")
    assert "digest" not in load_site_config(path).policy.answers
    with pytest.raises(ConfigError, match="does not name 'digest'"):
        stop_answering(path, "digest")


@pytest.mark.slow
@needs_browser
def test_a_hospital_watches_in_a_browser(site: Path, tmp_path: Path) -> None:
    state = site.parent / "state"

    def text() -> str:
        return driver.execute_script("return document.getElementById('main')?.innerText ?? ''")

    with pages(site) as address, keep_beating(state / ALIVE), browser(tmp_path / "profile") as driver:
        driver.get(address)
        until(lambda: "Nothing has been asked yet" in text())
        with note_request(state, "train", run=RUN, name="skin", round=7):
            until(lambda: "Answering train of skin, round 7" in text())
        until(lambda: "The last request was answered" in text())
        pause(state)
        until(lambda: "The hospital has paused graz" in text())


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_hospitals_page_fits_a_phone_and_can_be_read(site: Path, tmp_path: Path, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    with pages(site) as address, browser(tmp_path / "profile") as driver:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        driver.get(address)
        until(lambda: "What has left this building" in text(driver))
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
        faint = driver.execute_script(FAINT)
        assert not faint, faint

"""The operator's pages over HTTP: who may ask, what is answered, and what a stranger can do with them."""

import threading
import time
import urllib.request
from pathlib import Path

import pytest

from perennial.deploy.certificates import make_authority, make_server, write_issued
from perennial.foundation.errors import ConfigError
from perennial.foundation.tokens import read_token
from perennial.live import operator as module
from perennial.live.guard import Sessions, allowed_hosts
from perennial.live.operator import OperatorPages
from perennial.server.control import read_request
from tests.live_pages import TOKEN, ask, events_of, going_on, operator_pages, served, until
from tests.run_folders import HOSTILE, write_run


def signed_in(address: str) -> tuple[str, str]:
    """(cookie, the word that forms carry)."""
    answer = ask(f"{address}/sign-in", {"token": TOKEN, "back": "/"}, Origin=address)
    assert answer.status == 303
    cookie = answer.headers["set-cookie"].split(";")[0]
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
    form = ask(address, Cookie=cookie).body.partition('name="form" value="')[2].partition('"')[0]
    assert len(form) > 20
    return cookie, form


def test_every_answer_forbids_what_the_pages_do_not_need(tmp_path: Path) -> None:
    with going_on(tmp_path), operator_pages(tmp_path) as address:
        for path in ("/", "/runs/trial", "/runs/none", "/static/live.js", "/metrics", "/nothing"):
            headers = ask(address + path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy, path
            assert headers["x-content-type-options"] == "nosniff" and "server" not in headers
        page = ask(f"{address}/runs/trial").body
        assert "<style" not in page and " style=" not in page and "onclick" not in page
        assert page.count("<script") == 1 and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "127.0.0.1:80@evil"])
def test_a_foreign_name_reaches_nothing(tmp_path: Path, host: str) -> None:
    with going_on(tmp_path), operator_pages(tmp_path) as address:
        assert ask(f"{address}/runs/trial", Host=host).status == 403


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "trial%2f..%2ftrial", ".control", "link", "a" * 5000],
)
def test_a_name_that_the_folder_does_not_list_is_no_run(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "outside")
    runs = tmp_path / "runs"
    with going_on(runs), operator_pages(runs, TOKEN) as address:
        (runs / "link").symlink_to(tmp_path / "outside")
        for path in ("", "/events", "/report.html", "/pause"):
            assert ask(f"{address}/runs/{name}{path}").status in (400, 404)
        assert ask(f"{address}/static/../guard.py").status == 404
        assert ask(f"{address}/static/%2e%2e/guard.py").status == 404


def test_pages_without_a_token_steer_nothing(tmp_path: Path) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        assert "Pause" not in ask(f"{address}/runs/trial").body
        assert ask(f"{address}/runs/trial/pause").status == 403
        assert ask(f"{address}/runs/trial/pause", {"form": ""}, Origin=address).status == 403
        assert ask(f"{address}/sign-in").status == 404 and read_request(run.folder) is None


def test_a_pause_needs_the_token_a_session_and_the_pages_own_form(tmp_path: Path) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path, TOKEN) as address:
        run.begin_round(1, ["graz"])
        here = f"{address}/runs/trial"
        assert "Pause" in ask(here).body and "Sign in" in ask(f"{here}/pause").body
        assert ask(f"{address}/sign-in", {"token": "wrong"}, Origin=address).status == 403
        cookie, form = signed_in(address)
        assert "finishes the round" in ask(f"{here}/pause", Cookie=cookie).body
        refused = [
            ask(f"{here}/pause", {"form": form}, Origin=address),
            ask(f"{here}/pause", {"form": form}, Cookie=cookie),
            ask(f"{here}/pause", {"form": form}, Cookie=cookie, Origin="https://evil.example"),
            ask(f"{here}/pause", {"form": form}, Cookie=cookie, Origin=address, Sec_Fetch_Site="cross-site"),
            ask(f"{here}/pause", {"form": "x"}, Cookie=cookie, Origin=address),
            ask(f"{here}/pause", {}, Cookie=cookie, Origin=address),
            ask(f"{here}/resume", {"form": form}, Cookie=cookie, Origin=address),
        ]
        assert [answer.status for answer in refused[1:]] == [403, 403, 403, 403, 403, 409]
        assert "Sign in" in refused[0].body and read_request(run.folder) is None
        assert ask(f"{here}/pause", {"form": form}, Cookie=cookie, Origin=address).status == 303
        assert read_request(run.folder) == "pause"
        until(lambda: "It pauses when this round is over" in ask(here).body)
        assert ask(f"{here}/resume", {"form": form}, Cookie=cookie, Origin=address).status == 303
        assert read_request(run.folder) is None
        assert ask(f"{address}/sign-out", {"form": form}, Cookie=cookie, Origin=address).status == 303
        assert "Sign in" in ask(f"{here}/stop", Cookie=cookie).body


def test_wrong_tokens_are_soon_not_looked_at_and_forms_are_small(tmp_path: Path) -> None:
    with going_on(tmp_path), operator_pages(tmp_path, TOKEN) as address:
        large = ask(f"{address}/sign-in", {"token": "x" * 100_000}, Origin=address)
        assert large.status == 413
        for _ in range(10):
            assert ask(f"{address}/metrics", Authorization="Bearer wrong").status == 200  # read-only: all may
        threads = [
            threading.Thread(
                target=ask, args=(f"{address}/sign-in", {"token": "no"}), kwargs={"Origin": address}
            )
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ask(f"{address}/sign-in", {"token": TOKEN}, Origin=address).status == 403


def test_pages_that_others_reach_show_nothing_without_the_token(tmp_path: Path) -> None:
    with going_on(tmp_path), operator_pages(tmp_path, TOKEN, everyone=False) as address:
        for path in ("/", "/runs/trial", "/runs/trial/events", "/compare?run=trial"):
            assert "trial</h1>" not in ask(address + path).body and "Sign in" in ask(address + path).body
        assert ask(f"{address}/metrics").status == 401
        assert ask(f"{address}/metrics", Authorization="Bearer no").status == 401
        assert "perennial_run_status" in ask(f"{address}/metrics", Authorization=f"Bearer {TOKEN}").body
        cookie, _ = signed_in_read_only(address)
        assert "trial</h1>" in ask(f"{address}/runs/trial", Cookie=cookie).body


def signed_in_read_only(address: str) -> tuple[str, str]:
    answer = ask(f"{address}/sign-in", {"token": TOKEN, "back": "//evil.example"}, Origin=address)
    assert answer.headers["location"] == "/"
    return answer.headers["set-cookie"].split(";")[0], ""


def test_pages_over_tls_need_the_token_and_keep_their_cookie_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, files = make_authority("pages"), tmp_path / "tls"
    files.mkdir()
    write_issued(make_server(authority, ["127.0.0.1"], 30), files / "server.pem", files / "server.key")
    write_issued(authority, files / "ca.crt", files / "ca.key")
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.crt"))
    pages = OperatorPages(tmp_path, Sessions(TOKEN, "perennial", secure=True), everyone=False)
    app = pages.app(allowed_hosts("127.0.0.1", []))
    with going_on(tmp_path), served(app, files / "server.pem", files / "server.key") as address:
        assert "trial" not in ask(address).body
        cookie = ask(f"{address}/sign-in", {"token": TOKEN}, Origin=address).headers["set-cookie"]
        assert cookie.startswith("__Host-perennial=") and "; Secure" in cookie and "HttpOnly" in cookie
        assert "trial" in ask(address, Cookie=cookie.split(";")[0]).body


def test_a_run_is_stopped_by_the_pages_own_form_alone(tmp_path: Path) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path, TOKEN) as address:
        run.begin_round(1, ["graz"])
        cookie, form = signed_in(address)
        assert "The round that it is in is lost" in ask(f"{address}/runs/trial/stop", Cookie=cookie).body
        assert read_request(run.folder) is None, "looking at the question does nothing"
        stop = ask(f"{address}/runs/trial/stop", {"form": form}, Cookie=cookie, Origin=address)
        assert stop.status == 303 and read_request(run.folder) == "stop"


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        read_token(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="found 5 characters"):
        read_token(path)


def test_events_bring_what_changed_and_whoever_is_slow_gets_the_newest(tmp_path: Path) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(1, ["graz", "linz"])
        first = events_of(f"{address}/runs/trial/events", 1)[0]
        assert "0 of 2 sites answered" in first["headline"]
        slow = urllib.request.urlopen(f"{address}/runs/trial/events", timeout=10)
        for number in range(2, 200):
            run.end_round(number - 1, ["graz", "linz"])
            run.begin_round(number, ["graz", "linz"])
        run.answer("graz")
        assert (
            "Round 199 of 10"
            in until(
                lambda: next(
                    (p for p in events_of(f"{address}/runs/trial/events", 1) if "199" in p["headline"]), None
                )
            )["headline"]
        )
        slow.close()


def test_more_watchers_than_there_is_room_for_are_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WATCHERS", 20)
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(1, ["graz"])
        path = f"{address}/runs/trial/events"
        streams = [urllib.request.urlopen(path, timeout=10) for _ in range(20)]
        for stream in streams:
            assert stream.readline().startswith(b"retry:")
        assert ask(path).status == 503 and ask(f"{address}/runs/trial").status == 200
        for stream in streams:
            stream.close()
        until(lambda: _opens(path), seconds=30)


def _opens(path: str) -> bool:
    try:
        with urllib.request.urlopen(path, timeout=5) as stream:
            return stream.status == 200
    except OSError:
        return False


def test_metrics_name_runs_and_sites_and_escape_what_others_chose(tmp_path: Path) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(3, ["graz", HOSTILE[:60]])
        run.answer(HOSTILE[:60], "no", refused=True)
        run.end_round(3, ["graz"], refused=[{"site": HOSTILE[:60], "reason": "no"}])
        body = ask(f"{address}/metrics").body
        assert 'perennial_run_status{run="trial",status="running"} 1.0' in body
        assert 'perennial_run_sites{run="trial",state="refused"} 1.0' in body
        lines = [line for line in body.splitlines() if line.startswith("perennial_site_refusals_total")]
        assert {line[-4:] for line in lines if "graz" in line} == {" 0.0"}, "from 0 on"
        assert [line[-4:] for line in lines if "graz" not in line] == [" 1.0"]


def test_reports_and_comparisons_of_finished_runs_are_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
        (tmp_path / name / "report.html").write_text("<p>report</p>")
    with operator_pages(tmp_path) as address:
        answer = ask(f"{address}/runs/one/report.html")
        assert answer.body == "<p>report</p>" and "sandbox" in answer.headers["content-security-policy"]
        assert 'href="/runs/two"' in ask(address).body
        compared = ask(f"{address}/compare?run=one&run=two&run=../etc")
        assert compared.status == 200 and compared.body.count('scope="row"') == 2
        assert ask(f"{address}/compare").status == 404


def test_no_token_is_ever_in_a_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), going_on(tmp_path), operator_pages(tmp_path, TOKEN) as address:
        signed_in(address)
        ask(f"{address}/metrics?token={TOKEN}", Authorization=f"Bearer {TOKEN}")
        time.sleep(0.1)
    assert TOKEN not in caplog.text

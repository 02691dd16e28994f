"""The operator's pages over HTTP: who may ask, what is answered, and what a stranger can do with them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.cli.pages import serve
from perennial.foundation.errors import ConfigError
from perennial.live.operator import OperatorPages
from perennial.server.control import read_request
from tests.live_pages import ask, going_on, operator_pages
from tests.run_folders import HOSTILE, write_run


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
    with going_on(runs), operator_pages(runs) as address:
        (runs / "link").symlink_to(tmp_path / "outside")
        for path in ("", "/report.html", "/pause"):
            assert ask(f"{address}/runs/{name}{path}").status in (400, 404)
        assert ask(f"{address}/static/../web.py").status == 404
        assert ask(f"{address}/static/%2e%2e/web.py").status == 404


@pytest.mark.parametrize("path", ["/", "/runs/trial", "/runs/trial/pause", "/runs/trial/stop", "/metrics"])
def test_pages_steer_nothing(tmp_path: Path, path: str) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        assert ask(address + path, {"form": ""}, Origin=address).status == 405
        assert "Pause" not in ask(f"{address}/runs/trial").body and read_request(run.folder) is None


def test_pages_that_sign_nobody_in_listen_on_loopback_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="proxy"):
        serve(tmp_path, host="0.0.0.0")


def test_a_page_shows_the_round_that_goes_on(tmp_path: Path) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(1, ["graz", "linz"])
        assert "Round 1 of 10: 0 of 2 sites answered." in ask(f"{address}/runs/trial").body
        for number in range(2, 200):
            run.end_round(number - 1, ["graz", "linz"], accuracy=0.5)
            run.begin_round(number, ["graz", "linz"])
        run.answer("graz")
        page = ask(f"{address}/runs/trial").body
        assert "Round 199 of 10: 1 of 2 sites answered" in page and 'class="line' in page


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        write_run(tmp_path / name)
    closed, is_file = next(tmp_path.iterdir()), Path.is_file

    def refuse(path: Path) -> bool:
        if path.parent == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert {*OperatorPages(tmp_path).names()} == {"a", "b", "c"} - {closed.name}


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


def test_reports_of_finished_runs_are_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
        (tmp_path / name / "report.html").write_text("<p>report</p>")
    with operator_pages(tmp_path) as address:
        answer = ask(f"{address}/runs/one/report.html")
        assert answer.body == "<p>report</p>" and "sandbox" in answer.headers["content-security-policy"]
        assert 'href="/runs/two"' in ask(address).body


@pytest.mark.parametrize("port", ["0", "-1", "99999"])
def test_a_port_that_is_none_is_refused(tmp_path: Path, port: str) -> None:
    found = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", port])
    assert found.exit_code == 2 and "1<=x<=65535" in found.output

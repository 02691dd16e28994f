"""The operator's folder, keys, approvals: without any process of Flower."""

import hashlib
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.site import Connection, SiteConfig, load_site_config
from perennial.deploy import operations, supernode
from perennial.deploy.application import (
    approve,
    list_approved_apps,
    prepare_apps,
    read_application,
    read_offer,
    require_hash,
    require_read_only,
    stage_application,
    withdraw_approval,
)
from perennial.deploy.bundle import open_bundle, write_bundle, write_operator_files
from perennial.deploy.certificates import encode_public_line, make_node_key, read_node_key, write_node_key
from perennial.deploy.control import FlowerRun, RunBook
from perennial.deploy.federation import Federation, OperatorFolder, SiteRecord, create_operator_folder
from perennial.deploy.processes import require_flower
from perennial.deploy.supernode import (
    UNAPPROVED,
    describe_port,
    read_setup,
    require_free_port,
)
from perennial.foundation.errors import NOT_APPROVED, ConfigError, StateError
from perennial.foundation.heartbeat import renew


@pytest.fixture
def operator(tmp_path: Path) -> OperatorFolder:
    federation = Federation(name="test", hosts=("fl.example.org",), runtime="process")
    return create_operator_folder(tmp_path / "federation", federation, 30)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    content = {
        "name": "small",
        "data": {"source": "digits", "sites": 2},
        "model": {"name": "mlp"},
        "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
    }
    path.write_text(yaml.safe_dump({**content, "tasks": {"count": 2, "rounds": 1}}))
    return path


def test_a_federation_is_not_made_over_another(operator: OperatorFolder) -> None:
    with pytest.raises(StateError, match="not empty"):
        create_operator_folder(operator.path, operator.federation, 30)
    assert operator.authority_key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="perennial deploy init"):
        OperatorFolder(operator.path / "sites")


def test_bad_hosts_leave_nothing_behind(tmp_path: Path) -> None:
    federation = Federation(name="test", hosts=("not a host",))
    with pytest.raises(ConfigError, match="not a host"):
        create_operator_folder(tmp_path / "federation", federation, 30)
    assert not (tmp_path / "federation").exists()


def test_each_site_has_its_own_key(operator: OperatorFolder) -> None:
    key = encode_public_line(make_node_key())
    mark = operator.add_site("graz", key)
    assert len(mark.split()) == 8 and operator.site("graz") == SiteRecord()
    with pytest.raises(ConfigError, match="site 'graz' has this key"):
        operator.add_site("linz", key)
    with pytest.raises(ConfigError, match="did you mean 'graz'"):
        operator.site("gratz")
    operator.write_site("graz", SiteRecord(state="registered", node="7"))
    with pytest.raises(StateError, match="with another key; .*deploy revoke"):
        operator.add_site("graz", encode_public_line(make_node_key()))
    for name in ("../graz", "", "a b", "x" * 65):
        with pytest.raises(ConfigError, match="site name"):
            operator.add_site(name, encode_public_line(make_node_key()))
    for line in (b"", b"ssh-rsa AAAA", b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFsKB"):
        with pytest.raises(ConfigError, match="public key of linz"):
            operator.add_site("linz", line)


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    write_node_key(make_node_key(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StateError, match="exists already"):
        write_node_key(make_node_key(), path)
    path.chmod(0o644)
    with pytest.raises(StateError, match="chmod 600"):
        read_node_key(path)
    path.chmod(0o600)
    path.write_text("nonsense")
    with pytest.raises(StateError, match="not an unencrypted OpenSSH private key"):
        read_node_key(path)


def test_the_same_experiment_is_the_same_app(operator: OperatorFolder, experiment: Path) -> None:
    first = stage_application(experiment, [], "", operator.apps)
    again = stage_application(experiment, [], "", operator.apps)
    assert first == again == read_application("small", operator.apps)
    assert first.digest == hashlib.sha256(first.fab.read_bytes()).hexdigest()
    with pytest.raises(StateError, match="holds another experiment"):
        stage_application(experiment, ["seed=2"], "", operator.apps)
    assert stage_application(experiment, [], "once-more", operator.apps).digest == first.digest
    other = stage_application(experiment, ["seed=2"], "second", operator.apps)
    assert other.digest != first.digest
    with pytest.raises(StateError, match="submitted: once-more, second, small"):
        read_application("third", operator.apps)


@pytest.mark.parametrize(
    "name",
    ["../outside", "..", ".", "a/b", "/outside", ".control", "x" * 228, "Ä" * 114, "a\nb", "a\0b", "\udcff"],
)
def test_a_run_name_that_leads_elsewhere_is_refused_before_anything_is_written(
    operator: OperatorFolder, experiment: Path, tmp_path: Path, name: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    for command in (
        lambda: stage_application(experiment, [], name, operator.apps),
        lambda: read_application(name, operator.apps),
    ):
        with pytest.raises(ConfigError, match="run name: found .*, allowed 1 to 227 bytes .* without slash"):
            command()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["second try", "-n", "Köln Süd", "_x", "v1.2", "x" * 227, "second.fab"])
def test_a_run_name_of_one_folder_is_taken_and_sites_still_get_their_bundles(
    operator: OperatorFolder, experiment: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(operations.control, "list_runs", lambda folder: {})
    monkeypatch.setattr(operations.control, "start_run", lambda *_: "7")
    started = operations.submit(operator, experiment, [], name, "cpu", "0" * 64)
    assert started.startswith(f"{name}: started as Flower's run 7")
    assert read_application(name, operator.apps).folder == operator.apps / name
    operator.add_site("graz", encode_public_line(make_node_key()))
    write_bundle(operator, "graz")


def test_only_the_app_with_the_told_hash_is_approved(
    operator: OperatorFolder, experiment: Path, tmp_path: Path
) -> None:
    app = stage_application(experiment, [], "", operator.apps)
    home = tmp_path / "flower"
    with pytest.raises(StateError, match="no app is approved"):
        require_read_only(home, tmp_path / "approvals")
    prepare_apps(home, tmp_path / "approvals")
    approvals, config = tmp_path / "approvals", SiteConfig(site="graz", state_dir=tmp_path)
    offer = read_offer(app.fab, config)
    with pytest.raises(ConfigError, match="ask the operator which is right"):
        require_hash(offer, "0" * 64)
    require_hash(offer, app.digest)
    assert list_approved_apps(approvals) == []
    approved = approve(offer, home, approvals)
    assert approved.title == "small" and approved.app.endswith(app.digest[:8])
    assert list_approved_apps(approvals) == [approved]
    unpacked = home / "apps" / approved.app
    assert sorted(path.name for path in unpacked.rglob("*")) == ["experiment.yaml", "pyproject.toml"]
    for path in (home / "apps", unpacked / "experiment.yaml"):
        assert not path.stat().st_mode & 0o222, "nobody but root can change what was approved"
    with pytest.raises(ConfigError, match="not approved here"):
        withdraw_approval("other", home, tmp_path / "approvals")
    withdraw_approval(approved.app, home, tmp_path / "approvals")
    assert list_approved_apps(approvals) == [] and not unpacked.exists()
    broken = tmp_path / "broken.fab"
    broken.write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match="not an app bundle"):
        read_offer(broken, config)


def test_a_site_without_connection_or_key_says_so(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("site: graz\nstate_dir: state\n")
    with pytest.raises(ConfigError, match=r"connection\.superlink"):
        read_setup(path)
    path.write_text("site: graz\nstate_dir: state\nconnection: {superlink: 'fl:9092'}\n")
    with pytest.raises(StateError, match=r"node\.key: cannot be read"):
        read_setup(path)


def test_a_check_from_outside_a_container_knows_the_sites_own_supernode_and_a_start_does_not(
    operator: OperatorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.add_site("graz", encode_public_line(make_node_key()))
    folder = tmp_path / "graz"
    open_bundle(write_bundle(operator, "graz"), folder)
    write_node_key(make_node_key(), folder / "node.key")
    asked: list[bool] = []
    monkeypatch.setattr(supernode, "require_read_only", lambda *_: None)  # root may write everywhere
    monkeypatch.setattr(supernode, "check_admission", lambda *_, connected: asked.append(connected))
    check = ["site", "check", str(folder / "site.yaml")]
    assert "does not run" in CliRunner().invoke(app, check).output and asked == [False]
    renew(folder / "state" / supernode.ALIVE)
    said = CliRunner().invoke(app, check)
    assert said.exit_code == 0 and "one runs already" in said.output and asked.pop() is True
    supernode.check_superlink(read_setup(folder / "site.yaml"))  # as start does
    assert asked.pop() is False


def test_compose_files_are_hardened(operator: OperatorFolder, tmp_path: Path) -> None:
    path = operator.path / "deploy.yaml"
    path.write_text(path.read_text().replace("runtime: process", "runtime: compose"))
    write_operator_files(OperatorFolder(operator.path))
    operator.add_site("graz", encode_public_line(make_node_key()))
    open_bundle(write_bundle(operator, "graz"), tmp_path / "graz")
    for folder in (operator.path, tmp_path / "graz"):
        services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
        for name, service in services.items():
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["user"] == "${PERENNIAL_USER}" and service["logging"]["options"], name
        assert "PERENNIAL_USER=0" not in (folder / ".env").read_text()
        for name, service in services.items():
            if name.startswith("superexec-"):  # runs apps
                assert service["network_mode"] == "none" and "networks" not in service, name
                assert not any(volume.endswith((".key", "certificates:ro")) for volume in service["volumes"])
    site = yaml.safe_load((tmp_path / "graz" / "compose.yaml").read_text())["services"]
    assert "ports" not in site["supernode"] and "./:/site:ro" in site["supernode"]["volumes"]
    assert "/dev/null:/site/node.key:ro" in site["superexec-clientapp"]["volumes"]
    assert not any("DATA" in volume for volume in site["supernode"]["volumes"])


COMPOSE_PROJECT = re.compile(r"[a-z0-9][a-z0-9_-]*")
"""What compose takes as the name of a project."""


def test_every_name_is_a_project_of_its_own_for_compose(tmp_path: Path) -> None:
    names = ["graz", "Graz", "st.elsewhere", "st-elsewhere", "ST.elsewhere", "a_b", "007", "no", "1e5"]
    projects: list[str] = []
    for index, name in enumerate(names):
        federation = Federation(name=name, hosts=("fl.example.org",))
        operator = create_operator_folder(tmp_path / str(index), federation, 30)
        write_operator_files(operator)
        operator.add_site(name, encode_public_line(make_node_key()))
        site = tmp_path / f"site-{index}"
        open_bundle(write_bundle(operator, name), site)
        assert load_site_config(site / "site.yaml").site == name
        for folder in (operator.path, site):
            project = yaml.safe_load((folder / "compose.yaml").read_text())["name"]
            assert isinstance(project, str) and COMPOSE_PROJECT.fullmatch(project), name
            projects.append(project)
    assert len(set(projects)) == len(projects)
    assert projects[:2] == ["graz", "perennial-graz"], "a name that compose takes is left as it is"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_no_key_enters_a_repository_that_a_folder_is_made_in(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    operator = create_operator_folder(
        tmp_path / "federation", Federation(name="test", hosts=("fl.example.org",)), 30
    )
    write_operator_files(operator)
    operator.add_site("graz", encode_public_line(make_node_key()))
    site = tmp_path / "site"
    open_bundle(write_bundle(operator, "graz"), site)
    write_node_key(make_node_key(), site / "node.key")
    command = ["git", "-C", tmp_path, "add", "--all", "--dry-run"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    (site / ".gitignore").write_text("node.key\n")
    open_bundle(write_bundle(operator, "graz"), site)
    assert (site / ".gitignore").read_text() == "node.key\n", "what the hospital wrote stays"


def test_the_log_of_a_run_that_has_not_started_is_not_waited_for(
    operator: OperatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {run: FlowerRun(status) for run, status in (("7", "pending"), ("8", "running"), ("9", "starting"))}
    monkeypatch.setattr(operations.control, "list_runs", lambda folder: runs)
    monkeypatch.setattr(operations, "read_application", lambda *_: None)
    book = RunBook(operator.apps)
    for name, run in (("waits", "7"), ("runs", "8"), ("begins", "9")):
        book.note(name, run, bundle="a" * 64)
    with pytest.raises(StateError, match="run 'waits': pending .*SuperExec"):
        operations.last_run(operator, "waits", logs=True)
    with pytest.raises(StateError, match="starting"):
        operations.last_run(operator, "begins", logs=True)
    assert operations.last_run(operator, "runs", logs=True) == "8"
    assert operations.last_run(operator, "waits") == "7"


def test_a_changed_port_reaches_compose_by_the_next_command_and_settings_stay(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    assert CliRunner().invoke(app, ["deploy", "init", str(folder), "--host", "fl.example.org"]).exit_code == 0
    (folder / ".env").write_text("LOG_FILES=3\n")
    path = folder / "deploy.yaml"
    path.write_text(path.read_text().replace("fleet_port: 9092", "fleet_port: 9123") + "health_port: 9099\n")
    before = (folder / "compose.yaml").read_text()
    assert ":9092:9092" in before
    assert CliRunner().invoke(app, ["deploy", "rotate", "--folder", str(folder)]).exit_code == 0
    after = (folder / "compose.yaml").read_text()
    assert ":9123:9123" in after and (folder / ".env").read_text() == "LOG_FILES=3\n"


@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_the_operators_processes_are_started_by_what_is_there(tmp_path: Path, runtime: str) -> None:
    command = ["deploy", "init", str(tmp_path / "f"), "--host", "fl.example.org", "--runtime", runtime]
    assert CliRunner().invoke(app, command).exit_code == 0
    units = {path.name for path in (tmp_path / "f").glob("*.service")}
    assert units == (
        {"perennial-superlink.service", "perennial-pages.service"} if runtime == "process" else set()
    )
    assert (tmp_path / "f" / "compose.yaml").exists() == (runtime == "compose")
    for unit in units:
        text = (tmp_path / "f" / unit).read_text()
        assert "Restart=always" in text and "@{" not in text and "NoNewPrivileges=true" in text


def test_a_second_supernode_on_a_machine_is_told_which_key_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        connection = Connection(superlink="fl.example.org:9092", runtime_port=port)
        with pytest.raises(StateError, match=f"runtime_port: {port} .*is in use"):
            require_free_port(connection)
        with pytest.raises(StateError, match="runtime_port"):
            describe_port(connection)
    assert "is free" in describe_port(connection)


def test_an_app_that_is_not_approved_is_known_by_the_line_that_flower_logs() -> None:
    line = f"perennial.foundation.errors.PolicyRefusal: {NOT_APPROVED}: {'f0' * 32}\n".encode()
    found = UNAPPROVED.search(line)
    assert found is not None and found[1] == b"f0" * 32


def test_only_flower_of_one_version_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perennial.deploy.processes.version", lambda _: "1.39.0")
    with pytest.raises(StateError, match=r"flwr: found 1\.39\.0, allowed 1\.42\.x"):
        require_flower()

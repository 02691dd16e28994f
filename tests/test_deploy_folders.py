"""The operator's folder, bundles, keys, approvals, report pages: without any process of Flower."""

import hashlib
import http.client
import io
import tarfile
import threading
from pathlib import Path

import pytest
import yaml

from config.site import load_site_config
from deploy.application import read_application, stage_application
from deploy.approval import approve, approved_apps, prepare_apps, read_hash, require_read_only, withdraw
from deploy.bundle import open_bundle, write_bundle, write_operator_files
from deploy.federation import Federation, OperatorFolder, SiteRecord, create_operator_folder
from deploy.keys import make_node_key, public_line, read_node_key, seal, write_node_key
from deploy.reports import report_server
from deploy.supernode import read_setup
from foundation.errors import ConfigError, StateError

PASSPHRASE = "correct horse battery staple"


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
        "learner": {"optimizer": {"lr": 0.1}},
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
    key = public_line(make_node_key())
    mark = operator.add_site("graz", key)
    assert len(mark.split()) == 8 and operator.site("graz") == SiteRecord()
    with pytest.raises(ConfigError, match="site 'graz' has this key"):
        operator.add_site("linz", key)
    with pytest.raises(ConfigError, match="did you mean 'graz'"):
        operator.site("gratz")
    operator.write_site("graz", SiteRecord(state="registered", node="7"))
    with pytest.raises(StateError, match="revoke it"):
        operator.add_site("graz", public_line(make_node_key()))
    for name in ("../graz", "", "a b", "x" * 65):
        with pytest.raises(ConfigError, match="site name"):
            operator.add_site(name, public_line(make_node_key()))
    for line in (b"", b"ssh-rsa AAAA", b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFsKB"):
        with pytest.raises(ConfigError, match="public key of linz"):
            operator.add_site("linz", line)


def test_a_bundle_with_a_sealed_key_opens_with_its_passphrase_only(
    operator: OperatorFolder, tmp_path: Path
) -> None:
    key = make_node_key()
    operator.add_site("linz", public_line(key))
    (operator.path / "sites" / "linz.sealed").write_bytes(seal(key, PASSPHRASE))
    bundle = write_bundle(operator, "linz")
    assert b"PRIVATE KEY" not in bundle.read_bytes()
    site = tmp_path / "linz"
    with pytest.raises(ConfigError, match="give its passphrase"):
        open_bundle(bundle, site, None)
    with pytest.raises(ConfigError, match="cannot be opened with this passphrase"):
        open_bundle(bundle, site, "wrong" * 4)
    assert not site.exists(), "nothing is written by an attempt that fails"
    assert "node.key" in open_bundle(bundle, site, PASSPHRASE)
    assert public_line(read_node_key(site / "node.key")) == public_line(key)
    config = load_site_config(site / "site.yaml")
    assert config.connection is not None and config.connection.superlink == "fl.example.org:9092"
    assert config.state_dir == site / "state"
    with pytest.raises(ConfigError, match="12 and more"):
        seal(key, "short")


def test_a_newer_bundle_changes_nothing_that_the_hospital_decided(
    operator: OperatorFolder, tmp_path: Path
) -> None:
    operator.add_site("graz", public_line(make_node_key()))
    bundle = write_bundle(operator, "graz")
    site = tmp_path / "graz"
    open_bundle(bundle, site, None)
    (site / "site.yaml").write_text("site: graz\nstate_dir: elsewhere\n")
    before = (site / "ca.crt").read_bytes()
    operator.renew_authority()
    written = open_bundle(write_bundle(operator, "graz"), site, None)
    assert "site.yaml" not in written and "elsewhere" in (site / "site.yaml").read_text()
    after = (site / "ca.crt").read_bytes()
    assert after.endswith(before) and after != before, "the new authority beside the old one"


def archive(path: Path, members: dict[str, bytes], link: bool = False) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if link:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            tar.addfile(member, io.BytesIO(data))
    return path


def members(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # pyright: ignore[reportOptionalMemberAccess]


def with_sums(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same with checksums that fit, as whoever makes a bundle can write them."""
    kept = {name: data for name, data in sorted(files.items()) if name != "graz/SHA256SUMS"}
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name[5:]}\n" for name, data in kept.items()]
    return {**kept, "graz/SHA256SUMS": "".join(sums).encode()}


def test_a_damaged_bundle_writes_nothing(operator: OperatorFolder, tmp_path: Path) -> None:
    operator.add_site("graz", public_line(make_node_key()))
    good = write_bundle(operator, "graz")
    files, site = members(good), tmp_path / "site"
    changed = archive(tmp_path / "changed.tar.gz", {**files, "graz/site.yaml": b"site: other\n"})
    with pytest.raises(ConfigError, match=r"checksums do not fit for site\.yaml"):
        open_bundle(changed, site, None)
    extra = archive(tmp_path / "extra.tar.gz", {**files, "graz/offered/extra.fab": b""})
    with pytest.raises(ConfigError, match=r"checksums do not fit for offered/extra\.fab"):
        open_bundle(extra, site, None)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(good.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="not a readable tar"):
        open_bundle(cut, site, None)
    data, refused = good.read_bytes(), 0
    for position in range(10, len(data), 37):
        cut.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        try:
            assert open_bundle(cut, tmp_path / "sound", None), "damage only after the last member"
        except ConfigError:
            refused += 1
    assert refused > len(data) // 37 // 2
    assert not site.exists()


@pytest.mark.parametrize(
    "name",
    [
        "graz/flower/apps/perennial.perennial.0-1-0.deadbeef/client/app.py",
        "graz/state/ledger.jsonl",
        "graz/node.key",
        "graz/node.key.pub",
        "graz/compose.override.yaml",
        "graz/data/graz/digit-0/0.png",
        "graz/offered/deeper/app.fab",
        "graz/offered/.fab",
        "graz/offered/app.fab/..",
        "graz/offered/app.fab\n",
        "graz/extra",
        "graz/../../evil",
        "/etc/evil",
        "evil",
    ],
)
def test_a_bundle_writes_only_what_a_bundle_holds(
    operator: OperatorFolder, tmp_path: Path, name: str
) -> None:
    """Whoever makes a bundle writes its checksums too, so they fit here."""
    key, site = make_node_key(), tmp_path / "site"
    operator.add_site("graz", public_line(key))
    site.mkdir()
    write_node_key(key, site / "node.key")
    (site / "state").mkdir()
    (site / "state" / "ledger.jsonl").write_text("what has left\n")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    files = with_sums({**members(write_bundle(operator, "graz")), name: b"evil"})
    hostile = archive(tmp_path / "hostile.tar.gz", files)
    with pytest.raises(ConfigError, match=r"allowed plain files below one folder: .*ca\.crt"):
        open_bundle(hostile, site, None)
    hostile.unlink()
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert {path: data for path, data in after.items() if operator.path not in path.parents} == {
        path: data for path, data in before.items() if operator.path not in path.parents
    }


def test_a_bundle_with_a_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed plain files"):
        open_bundle(archive(tmp_path / "link.tar.gz", {"graz/ca.crt": b""}, link=True), tmp_path / "s", None)
    assert not (tmp_path / "s").exists()


def test_a_newer_bundle_does_not_change_what_runs(operator: OperatorFolder, tmp_path: Path) -> None:
    operator.add_site("graz", public_line(make_node_key()))
    bundle, site = write_bundle(operator, "graz"), tmp_path / "site"
    open_bundle(bundle, site, None)
    before = {path.name: path.read_bytes() for path in site.iterdir() if path.is_file()}
    files = {name: data + b"\n# newer" for name, data in members(bundle).items()}
    written = open_bundle(archive(tmp_path / "newer.tar.gz", with_sums(files)), site, None)
    assert sorted(written) == ["GUIDE.md", "SHA256SUMS", "ca.crt"]
    after = {path.name: path.read_bytes() for path in site.iterdir() if path.is_file()}
    assert {name for name in before if after[name] != before[name]} == set(written)


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
    assert first.digest == read_hash(first.fab)
    with pytest.raises(StateError, match="holds another experiment"):
        stage_application(experiment, ["seed=2"], "", operator.apps)
    other = stage_application(experiment, ["seed=2"], "second", operator.apps)
    assert other.digest != first.digest
    with pytest.raises(StateError, match="submitted: second, small"):
        read_application("third", operator.apps)


def test_only_the_app_with_the_told_hash_is_approved(
    operator: OperatorFolder, experiment: Path, tmp_path: Path
) -> None:
    app = stage_application(experiment, [], "", operator.apps)
    home = tmp_path / "flower"
    with pytest.raises(StateError, match="no app is approved"):
        require_read_only(home)
    prepare_apps(home)
    with pytest.raises(ConfigError, match="ask the operator which is right"):
        approve(app.fab, home, "0" * 64)
    assert approved_apps(home) == []
    approved = approve(app.fab, home, app.digest)
    assert approved.experiments == ("small",) and approved.name.endswith(app.digest[:8])
    assert approved_apps(home) == [approved]
    for path in (home / "apps", home / "apps" / approved.name / "client" / "app.py"):
        assert not path.stat().st_mode & 0o222, "nobody but root can change what was approved"
    with pytest.raises(ConfigError, match="not approved here"):
        withdraw("other", home)
    withdraw(approved.name, home)
    assert approved_apps(home) == []
    broken = tmp_path / "broken.fab"
    broken.write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match="not an app bundle"):
        approve(broken, home, read_hash(broken))


def test_a_site_without_connection_or_key_says_so(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("site: graz\nstate_dir: state\n")
    with pytest.raises(ConfigError, match=r"connection\.superlink"):
        read_setup(path)
    path.write_text("site: graz\nstate_dir: state\nconnection: {superlink: 'fl:9092', any_app: true}\n")
    with pytest.raises(StateError, match=r"node\.key: cannot be read"):
        read_setup(path)


def test_compose_files_are_hardened(operator: OperatorFolder, tmp_path: Path) -> None:
    write_operator_files(operator)
    operator.add_site("graz", public_line(make_node_key()))
    open_bundle(write_bundle(operator, "graz"), tmp_path / "graz", None)
    for folder in (operator.path, tmp_path / "graz"):
        services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
        for name, service in services.items():
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["user"] == "${PERENNIAL_USER}" and service["logging"]["options"], name
        assert "PERENNIAL_USER=0" not in (folder / ".env").read_text()
    site = yaml.safe_load((tmp_path / "graz" / "compose.yaml").read_text())["services"]["supernode"]
    assert "ports" not in site and "./:/site:ro" in site["volumes"]


def test_report_pages_and_nothing_else_are_served(tmp_path: Path) -> None:
    run = tmp_path / "a & b"
    (run / "checkpoint").mkdir(parents=True)
    (run / "report.html").write_text("<h1>the report</h1>")
    (run / "model.safetensors").write_text("weights")
    with report_server(tmp_path, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])

        def get(path: str) -> tuple[int, bytes]:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

        status, index = get("/")
        assert status == 200 and b"a &amp; b" in index
        assert get("/a%20%26%20b/report.html") == (200, b"<h1>the report</h1>")
        for path in ("/a%20%26%20b/model.safetensors", "/a%20%26%20b/", "/../report.html", "/x/report.html"):
            assert get(path)[0] == 404, path
        connection.request("POST", "/")
        assert connection.getresponse().status == 501
        server.shutdown()


def test_the_superlinks_database_waits_for_a_busy_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supercore import constant, sql_mixin
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore
    from sqlalchemy import text

    from deploy.superlink_process import BUSY_TIMEOUT, wait_for_the_database

    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", constant.SQLITE_PRAGMAS)
    wait_for_the_database()
    store = SqlObjectStore(str(tmp_path / "superlink.db"))
    store.initialize()
    with store.session() as session:
        assert session.scalar(text("PRAGMA busy_timeout")) == BUSY_TIMEOUT
        assert session.scalar(text("PRAGMA foreign_keys")) == 1

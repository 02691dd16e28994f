"""Bundles: what a hospital receives, what it may write there, and what it may not."""

import gzip
import io
import re
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.site import load_site_config
from perennial.deploy.bundle import open_bundle, write_bundle
from perennial.deploy.certificates import encode_public_line, make_node_key, write_node_key
from perennial.deploy.federation import Federation, OperatorFolder, create_operator_folder
from perennial.foundation.errors import ConfigError


@pytest.fixture
def operator(tmp_path: Path) -> OperatorFolder:
    federation = Federation(name="test", hosts=("fl.example.org",), runtime="process")
    return create_operator_folder(tmp_path / "federation", federation, 30)


def test_a_bundle_makes_a_site_and_holds_no_secret(operator: OperatorFolder, tmp_path: Path) -> None:
    operator.add_site("linz", encode_public_line(make_node_key()))
    bundle, site = write_bundle(operator, "linz"), tmp_path / "linz"
    assert b"PRIVATE KEY" not in gzip.decompress(bundle.read_bytes())
    open_bundle(bundle, site)
    config = load_site_config(site / "site.yaml")
    assert config.connection is not None and config.connection.superlink == "fl.example.org:9092"
    assert config.state_dir == site / "state"


def test_a_newer_bundle_changes_nothing_that_the_hospital_decided(
    operator: OperatorFolder, tmp_path: Path
) -> None:
    operator.add_site("graz", encode_public_line(make_node_key()))
    bundle = write_bundle(operator, "graz")
    site = tmp_path / "graz"
    open_bundle(bundle, site)
    (site / "site.yaml").write_text("site: graz\nstate_dir: elsewhere\n")
    before = (site / "ca.crt").read_bytes()
    operator.renew_server(30, new_authority=True)
    written = open_bundle(write_bundle(operator, "graz"), site)
    assert "site.yaml" not in written and "elsewhere" in (site / "site.yaml").read_text()
    after = (site / "ca.crt").read_bytes()
    assert after != before and after == operator.authority_certificate.read_bytes()


def test_each_side_is_told_every_authority_that_it_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.deploy.control.register_node", lambda folder, name: "7")

    def said(*arguments: str | Path) -> str:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        return done.output

    def told(text: str) -> list[str]:
        return re.findall(r"SHA-256 ((?:[0-9A-F]{2}:){31}[0-9A-F]{2})", text)

    folder, site = tmp_path / "federation", tmp_path / "site"
    inside = ("--folder", folder)
    (first,) = told(said("deploy", "init", folder, "--host", "localhost", "--runtime", "process"))
    (tmp_path / "key.pub").write_bytes(encode_public_line(make_node_key()))
    said("deploy", "add-site", "graz", tmp_path / "key.pub", *inside)

    def opened() -> list[str]:
        said("deploy", "add-site", "graz", *inside)
        return told(said("site", "open", folder / "bundles" / "graz.tar.gz", "--folder", site))

    assert opened() == [first]
    said_of_it = said("deploy", "rotate", "--authority", *inside)
    (second,) = told(said_of_it)
    assert "send every site a new bundle" in said_of_it and second != first
    assert opened() == [second], "the old authority is gone from the site too"
    assert told(said("deploy", "rotate", *inside)) == [second], "the authority stays"


def archive(path: Path, members: dict[str, bytes], link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in sorted(members.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name == link:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            tar.addfile(member, io.BytesIO(data))
    return path


def members(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # pyright: ignore[reportOptionalMemberAccess]


def test_a_damaged_bundle_writes_nothing(operator: OperatorFolder, tmp_path: Path) -> None:
    operator.add_site("graz", encode_public_line(make_node_key()))
    good = write_bundle(operator, "graz")
    site = tmp_path / "site"
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(good.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="not a readable tar"):
        open_bundle(cut, site)
    data, refused = good.read_bytes(), 0
    for position in range(10, len(data), 37):
        cut.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        try:
            assert open_bundle(cut, tmp_path / "sound"), "damage only after the last member"
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
    key, site = make_node_key(), tmp_path / "site"
    operator.add_site("graz", encode_public_line(key))
    site.mkdir()
    write_node_key(key, site / "node.key")
    (site / "state").mkdir()
    (site / "state" / "ledger.jsonl").write_text("what has left\n")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    files = {**members(write_bundle(operator, "graz")), name: b"evil"}
    hostile = archive(tmp_path / "hostile.tar.gz", files)
    with pytest.raises(ConfigError, match=r"allowed plain files below one folder: .*ca\.crt"):
        open_bundle(hostile, site)
    hostile.unlink()
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert {path: data for path, data in after.items() if operator.path not in path.parents} == {
        path: data for path, data in before.items() if operator.path not in path.parents
    }


def test_a_bundle_with_a_link_is_refused(operator: OperatorFolder, tmp_path: Path) -> None:
    operator.add_site("graz", encode_public_line(make_node_key()))
    files, site = members(write_bundle(operator, "graz")), tmp_path / "s"
    with pytest.raises(ConfigError, match=r"not packed as .* a link,"):
        open_bundle(archive(tmp_path / "link.tar.gz", files, link="graz/GUIDE.md"), site)
    assert not site.exists()
    assert open_bundle(archive(tmp_path / "plain.tar.gz", files), site), "but for the link it opens"


def test_a_newer_bundle_does_not_change_what_runs(operator: OperatorFolder, tmp_path: Path) -> None:
    operator.add_site("graz", encode_public_line(make_node_key()))
    bundle, site = write_bundle(operator, "graz"), tmp_path / "site"
    open_bundle(bundle, site)
    before = {path.name: path.read_bytes() for path in site.iterdir() if path.is_file()}
    files = {name: data + b"\n# newer" for name, data in members(bundle).items()}
    written = open_bundle(archive(tmp_path / "newer.tar.gz", files), site)
    assert sorted(written) == ["GUIDE.md", "ca.crt"]
    after = {path.name: path.read_bytes() for path in site.iterdir() if path.is_file()}
    assert {name for name in before if after[name] != before[name]} == set(written)

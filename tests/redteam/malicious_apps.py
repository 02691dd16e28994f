"""Malicious apps and bundles by the hundred, and what reading each one takes a hospital.

`bounded` lets one be read as `perennial site approve` and `perennial site open` read it, in a process of its
own with 200 MB more than the program has.
"""
# ruff: noqa: E501, RUF001

import hashlib
import io
import json
import os
import resource
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml

from perennial.config.document import DOCUMENT, compute_document_digest
from perennial.config.experiment import load_experiment
from perennial.config.site import SiteConfig
from perennial.deploy.application import DATE, LARGEST, MANIFEST, PROJECT, VERSION, project_file, read_offer
from perennial.deploy.bundle import open_bundle
from perennial.deploy.review import offer_in_words
from perennial.foundation.errors import PerennialError

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
MEGABYTES, SECONDS = 200, 5
"""What reading one app or bundle may take."""
Members = list[tuple[str, bytes]]
Made = Iterator[tuple[str, bytes]]
"""(name of the case, bytes of the file)."""


def honest(**changes: object) -> Members:
    """The members of an app as `perennial deploy stage` makes it, but for the manifest."""
    content = yaml.safe_load(load_experiment(EXPERIMENTS / "quickstart.yaml").to_yaml()) | changes
    text = yaml.safe_dump(content, sort_keys=False)
    digest = compute_document_digest(content)
    return [(PROJECT, project_file(VERSION, digest).encode()), (DOCUMENT, text.encode())]


def manifest(members: Members) -> bytes:
    """What lists them, as Flower writes it."""
    lines = (f"{name},{hashlib.sha256(data).hexdigest()},{len(data) * 8}" for name, data in members)
    return "\n".join(lines).encode()


def packed(members: Members, *, listed: bool = True, method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of exactly these members, with a manifest of them all."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in [*members, *([(MANIFEST, manifest(members))] if listed else [])]:
            info = zipfile.ZipInfo(name, DATE)
            info.compress_type = method
            archive.writestr(info, data)
    return buffer.getvalue()


def beside(name: str, data: bytes = b"import os\n") -> bytes:
    """An honest app with one member more."""
    return packed([*honest(), (name, data)])


CODE = (
    *("perennial/client/policy.py", "perennial.py", "torch/__init__.py", "sitecustomize.py", "evil.pth"),
    *("perennial/client/__pycache__/policy.cpython-311.pyc", "policy.so", "policy.pyd", "lib.egg"),
    *("perennial-0.2.0-py3-none-any.whl", "perennial.dist-info/entry_points.txt", "requirements.txt"),
)
PLACES = (
    *("../experiment.yaml", "../../etc/cron.d/x", "/etc/passwd", "a/../../b.yaml", "./experiment.yaml"),
    *("perennial/experiments/a/small.yaml", "EXPERIMENT.YAML", "experiment.yml", "experiment.yaml "),
    *(".INFO/CONTENT", ".info/x", ".hidden.yaml", "C:\\windows\\x", "\\\\server\\share", "con"),
    *("experiment.yaml:stream", "experiment.yaml\x00.py", "experiment.yaml\n", "\u202eexperiment.yaml"),
    *("еxperiment.yaml", "ｅxperiment.yaml", "\x1b[2Jx", "experiment.yaml/", "a/", "~/.bashrc", "a" * 250),
    *("encoder.json", "encoder.safetensors", "model.pkl", "data.csv", "site.yaml", "node.key"),
)


def more_members() -> Made:
    """Something beside the experiment."""
    for name in (*CODE, *PLACES):
        yield f"member {name[:40]!r}", beside(name)
    for name in ("weights.bin", "perennial/learning/extra.py"):
        yield f"member {name!r} that is empty", beside(name, b"")
    for name in (PROJECT, DOCUMENT, MANIFEST):
        members = [*honest(), (MANIFEST, manifest(honest()))]
        twice = [*members, (name, dict(members)[name])]
        yield f"{name} twice, the same", packed(twice, listed=False)
        yield f"{name} twice, another", packed([*members, (name, b"name: other\n")], listed=False)
        yield f"{name} twice, another first", packed([(name, b"name: other\n"), *members], listed=False)
    for count in (5, 1_000):
        yield f"{count} empty members", packed([*honest(), *((f"e{n}", b"") for n in range(count))])
        yield f"{count} empty folders", packed([(f"d{n}/", b"") for n in range(count)], listed=False)
    yield "an app in the app", beside("inner.fab", packed(honest()))


def fewer_members() -> Made:
    """Something missing, or not what it is said to be."""
    members = honest()
    for index, (name, _) in enumerate(members):
        yield f"without {name}", packed([each for each in members if each[0] != name])
        yield f"{name} empty", packed([(n, b"" if n == name else data) for n, data in members])
        changed = [*members]
        changed[index] = (name, changed[index][1] + b"\n# more\n")
        yield (
            f"{name} changed after the list was written",
            packed([*changed, (MANIFEST, manifest(members))], listed=False),
        )
    yield "without a manifest", packed(members, listed=False)
    for text in (b"", b"\n", b"pyproject.toml,00,8", manifest(members) + b"\n", manifest(members[::-1])):
        yield f"manifest {text[:24]!r}", packed([*members, (MANIFEST, text)], listed=False)
    yield "nothing", packed([], listed=False)


def projects() -> Made:
    """A pyproject.toml that is not the generated one."""
    project, document = honest()
    text = project[1].decode()
    changes = {
        "a dependency": ("dependencies = []", 'dependencies = ["evil"]'),
        "another ClientApp": ("perennial.client.app:app", "evil.app:app"),
        "another ServerApp": ("perennial.server.app:app", "evil.app:app"),
        "overrides": ('overrides = ""', 'overrides = "privacy={mode: none}"'),
        "another digest": ('digest = "', 'digest = "00'),
        "another experiment": ('experiment = "experiment.yaml"', 'experiment = "/etc/passwd"'),
        "another name": ('[project]\nname = "perennial"', '[project]\nname = "evil"'),
        "a build system": ("[tool.flwr.app]\n", '[build-system]\nrequires = ["evil"]\n\n[tool.flwr.app]\n'),
        "a comment": ("[project]\n", "[project] # hello\n"),
        "more included": ('    "experiment.yaml",\n', '    "experiment.yaml",\n    "**/*.py",\n'),
    }
    for name, (before, after) in changes.items():
        assert before in text, name
        yield (
            f"pyproject.toml with {name}",
            packed([(PROJECT, text.replace(before, after).encode()), document]),
        )
    yield "pyproject.toml that is no text", packed([(PROJECT, b"\xff\xfe\x00"), document])
    yield "pyproject.toml of 1 MB", packed([(PROJECT, text.encode() + b"#" * 2**20), document])


def documents() -> Made:
    """An experiment that is no document, or asks for what no experiment has."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    texts: dict[str, bytes] = {
        "no YAML": b"{{{",
        "a list": b"- a\n- b\n",
        "empty": b"",
        "UTF-16": "name: x\n".encode("utf-16"),
        "an alias bomb": bomb.encode(),
        "nested too deeply": b"[" * 100_000,
        "a tag that calls": b"name: !!python/object/apply:os.system ['true']\n",
        "a key twice": b"name: a\nname: b\n",
        "of 2 MB": b"name: " + b"x" * 2**21,
        "a number of a million digits": b"seed: " + b"9" * 10**6,
    }
    project = honest()[0]
    for name, text in texts.items():
        yield f"experiment.yaml: {name}", packed([project, (DOCUMENT, text)])
    encoder = {"per_digest": 2, "largest": 1.0}
    plug_ins: dict[str, dict[str, object]] = {
        "a strategy of the standard library": {"strategy": {"name": "os:system"}},
        "a plug-in that imports this": {"strategy": {"name": "this:x"}},
        "a plug-in source": {"data": {"source": "antigravity:fly", "sites": 2}},
        "a plug-in model": {"model": {"name": "evil:Model"}},
        "a plug-in loss": {"learner": {"classification": {"name": "evil:Loss"}}},
        "a plug-in in a plug-in": {"strategy": {"name": "contribution", "base": "evil:Strategy"}},
        "an unknown key": {"run_this": "rm -rf /"},
        "an encoder of the hospital's": {
            "digests": encoder
            | {"encoder": {"name": "autoencoder", "file": "../node.key", "sha256": "0" * 64}}
        },
        "a terabyte of rounds": {"tasks": {"count": 2, "rounds": 10**12}},
        "a million tasks": {"tasks": {"count": 10**6, "rounds": 1}},
        "data at the operator's": {"data": {"source": "folder", "path": "/proc/self/mem"}},
    }
    for name, change in plug_ins.items():
        yield f"experiment.yaml: {name}", packed(honest(**change))


def archives() -> Made:
    """An archive that other software reads in another way."""
    app = packed(honest())
    end = app[-22:]
    _, _, _, count, _, size, start, _ = struct.unpack("<4s4H2LH", end)
    for name, data in {
        "empty": b"",
        "only an end": end,
        "cut in the middle": app[: len(app) // 2],
        "bytes before": b"#!/bin/sh\n" + app,
        "bytes after": app + b"\n",
        "a second archive after": app + beside("evil.py"),
        "a comment": app[:-2] + struct.pack("<H", 4) + b"evil",
        "a count too low": app[:-22] + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, size, start, 0),
        "64,000 members": app[:-22] + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 64000, 64000, size, start, 0),
        "two disks": app[:-22] + struct.pack("<4s4H2LH", b"PK\5\6", 1, 0, count, count, size, start, 0),
        "a list elsewhere": app[:-22] + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, 0, 0),
        "ZIP64 marks": app[:-22] + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, size, start, 0),
    }.items():
        yield f"archive: {name}", data
    for name, place, value in (
        ("encrypted", 8, 1),
        ("with a data descriptor", 8, 8),
        ("packed by LZMA", 10, 14),
        ("a link", 38, 0xA1FF0000),
        ("with a comment", 32, 4),
        ("larger than it is", 24, 2**31),
        ("smaller than it is", 24, 3),
        ("with another checksum", 16, 7),
        ("elsewhere", 42, 5),
        ("with a longer name", 28, 4000),
    ):
        form = "<L" if place in (16, 20, 24, 38, 42) else "<H"
        data = bytearray(app)
        struct.pack_into(form, data, start + place, value)
        yield f"first member {name}", bytes(data)
    for name, place, value in (("another name", 30, 0x41), ("another method", 8, 8), ("another size", 22, 9)):
        data = bytearray(app)
        data[place] = value
        yield f"first header: {name}", bytes(data)
    yield "a bomb of 100 MB", _bomb(100 * 2**20)
    yield "two members in the same bytes", _overlapping(app, start, size)


def _bomb(size: int) -> bytes:
    """An experiment.yaml of zeros, which says that it is small."""
    packing = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = b"".join(packing.compress(bytes(2**20)) for _ in range(size // 2**20)) + packing.flush()
    name = DOCUMENT.encode()
    head = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 0, 0, len(data), 100, len(name), 0) + name + data
    line = struct.pack(
        "<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 0, 0, len(data), 100, len(name), 0, 0, 0, 0, 0, 0
    )
    line += name
    return head + line + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(line), len(head), 0)


def _overlapping(app: bytes, start: int, size: int) -> bytes:
    """The second line of the list points at the first member."""
    lines = bytearray(app[start : start + size])
    second = lines.index(b"PK\1\2", 4)
    struct.pack_into("<L", lines, second + 42, 0)
    return app[:start] + bytes(lines) + app[-22:]


def apps() -> Made:
    """Every malicious app."""
    for make in (more_members, fewer_members, projects, documents, archives):
        yield from make()
    yield "weights of 20 MB", beside("weights.safetensors", bytes(20 * 2**20))
    yield "200,000 empty members", packed([*honest(), *((f"e{n}", b"") for n in range(200_000))])
    yield "a bomb of 1 GB", _bomb(1000 * 2**20)
    yield "larger than an app", bytes(LARGEST + 1)


def tarred(members: Mapping[str, bytes], *special: tarfile.TarInfo, form: str = "w:gz") -> bytes:
    """A bundle of these members, and of special ones."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=form) as archive:  # pyright: ignore
        for path, data in members.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in special:
            archive.addfile(info)
    return buffer.getvalue()


def bundles() -> Made:
    """Every malicious bundle: what `perennial site open` is given."""
    for path in (
        *("../site.yaml", "graz/../../etc/passwd", "/etc/passwd", "graz/approvals/x.json", "graz/node.key"),
        *("graz/state/ledger.jsonl", "graz/offered/../site.yaml", "graz/offered/x.py", "graz/x.fab"),
        *("graz/offered/.x.fab", "graz/offered/a/b.fab", "graz/.bashrc", "graz/offered/x.FAB"),
        *("graz/SITE.YAML", "graz/page.token", "graz/opened.json", "graz/offered/x.fab\n", "site.yaml"),
    ):
        yield f"bundle with {path!r}", tarred({path: b"x"})
    for kind, name in (
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.DIRTYPE, "a folder"),
        (tarfile.CONTTYPE, "a file of another kind"),
    ):
        info = tarfile.TarInfo("graz/site.yaml")
        info.type, info.linkname = kind, "/etc/passwd"
        yield f"bundle with {name}", tarred({}, info)
    yield "bundle that is no archive", b"not a tar"
    yield "bundle that is cut", tarred({"graz/site.yaml": b"x" * 5000})[:60]
    yield "bundle with a member twice", tarred({"graz/ca.crt": b"x", "other/ca.crt": b"y"})
    yield "bundle of an authority alone", tarred({"graz/ca.crt": b"x"})
    yield "bundle with sums of its own", tarred({"graz/ca.crt": b"x", "graz/SHA256SUMS": b"00  ca.crt\n"})
    yield "bundle with a header of 1 MB", _long_header(2**20)


def large_bundles() -> Made:
    """Bundles that take memory to make, and must take none to refuse."""
    yield "bundle of 300 MB of zeros", tarred({"graz/ca.crt": bytes(300 * 2**20)})
    many = {f"graz/offered/a{n}.fab": b"" for n in range(100_000)}
    yield "bundle of 100,000 empty members", tarred(many)
    yield "bundle with a header of 100 MB", _long_header(100 * 2**20)


def _long_header(size: int) -> bytes:
    info = tarfile.TarInfo("graz/ca.crt")
    info.pax_headers = {"comment": "x" * size}
    return tarred({}, info)


def read_app(path: Path) -> str:
    """What a hospital is told of an app: '' if nothing is wrong with it."""
    site = SiteConfig(site="graz", state_dir=path.parent)
    return _told(lambda: [*offer_in_words(read_offer(path, site), site, None)])


def read_bundle(path: Path) -> str:
    """What a hospital is told of a bundle: '' if it was unpacked."""
    return _told(lambda: open_bundle(path, path.parent / "opened"))


def _told(read: Callable[[], object]) -> str:
    try:
        read()
    except PerennialError as error:
        return str(error) or type(error).__name__
    return ""


def bounded(read: Callable[[Path], str], path: Path) -> tuple[str, float, float]:
    """(what was told, seconds of the processor, megabytes) of one reading in a process of its own.

    The process has MEGABYTES more than this one. What ends in any other way than by a refusal is told as such.
    """
    reads, writes = os.pipe()
    if not (process := os.fork()):
        os.close(reads)
        before = _data()
        resource.setrlimit(resource.RLIMIT_DATA, (before + MEGABYTES * 2**20, before + MEGABYTES * 2**20))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        start = time.process_time()
        try:
            told = read(path)
        except BaseException as error:
            told = f"NOT REFUSED BUT {type(error).__name__}: {error}"
        seconds = time.process_time() - start
        used = (_peak() - before) / 2**20
        os.write(writes, json.dumps([told[:400], round(seconds, 3), round(max(0.0, used), 1)]).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        content = answer.read()
    _, status = os.waitpid(process, 0)
    if status or not content:
        return f"NOT REFUSED BUT ended with {status}", 0.0, 0.0
    told, seconds, megabytes = json.loads(content)
    return told, seconds, megabytes


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def _data() -> int:
    return _status("VmData:")


def _peak() -> int:
    """Upper bound of the data segment: how far the resident memory rose above the start counts."""
    return max(_data(), _status("VmHWM:") - _status("VmRSS:") + _data())

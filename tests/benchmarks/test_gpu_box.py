"""What is carried to a GPU box arrives whole, and its runs go on where they were stopped."""

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import page, parts
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.sequence import GRACE, SEQUENCE, Item, Place, Unfinished, run_sequence
from benchmarks.gpu.wheels import Target, installed_there, lacking


@pytest.fixture
def packed(tmp_path: Path) -> list[Path]:
    """Three files, one of them empty, in parts of 1,000 bytes."""
    folder = tmp_path / "everything"
    (folder / "data").mkdir(parents=True)
    (folder / "wheels").mkdir()
    (folder / "data" / "images.zip").write_bytes(bytes(range(256)) * 9)
    (folder / "data" / "nothing").write_bytes(b"")
    (folder / "wheels" / "one.txt").write_text("one")
    return parts.cut(folder, tmp_path / "parts", 1000)


def test_parts_are_no_larger_than_asked_and_arrive_in_any_order(tmp_path: Path, packed: list[Path]) -> None:
    assert [(part / parts.BYTES).stat().st_size for part in packed] == [1000, 1000, 307]
    store = tmp_path / "store"
    assert parts.receive(packed[2], store) == [0, 1]
    assert parts.receive(packed[0], store) == [1]
    assert parts.receive(packed[0], store) == [1]
    assert parts.receive(packed[1], store) == []
    assert (store / "data" / "images.zip").read_bytes() == bytes(range(256)) * 9
    assert (store / "data" / "nothing").read_bytes() == b""
    assert (store / "wheels" / "one.txt").read_text() == "one"
    assert sorted(path.name for path in store.iterdir()) == ["data", "wheels"]


def test_a_damaged_part_is_named_and_changes_nothing(tmp_path: Path, packed: list[Path]) -> None:
    store = tmp_path / "store"
    parts.receive(packed[0], store)
    (packed[1] / parts.BYTES).write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match=r"part-01: its bytes are not those that were packed"):
        parts.receive(packed[1], store)
    assert parts.receive(packed[2], store) == [1]


def test_parts_of_other_files_begin_anew(tmp_path: Path, packed: list[Path]) -> None:
    store = tmp_path / "store"
    parts.receive(packed[0], store)
    other = tmp_path / "other"
    other.mkdir()
    (other / "new").write_text("new")
    [part] = parts.cut(other, tmp_path / "new parts", 1000)
    assert parts.receive(part, store) == []
    assert (store / "new").read_text() == "new"


def test_a_name_that_leads_outside_is_refused(tmp_path: Path, packed: list[Path]) -> None:
    facts = json.loads((packed[0] / parts.FACTS).read_text())
    facts |= {"count": 1, "files": [{"name": "../escaped", "size": 3, "sha256": "0"}]}
    (packed[0] / parts.FACTS).write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="escaped: lies outside the store"):
        parts.receive(packed[0], tmp_path / "store")
    assert not (tmp_path / "escaped").exists()


def test_versions_are_read_as_pip_lists_them() -> None:
    there = installed_there("torch==2.11.0+cu130\nPyYAML==6.0\n# a remark\nsix\n\n")
    assert there == {"torch": "2.11.0", "pyyaml": "6.0", "six": ""}


def test_what_is_there_is_not_carried_and_neither_is_what_it_needs() -> None:
    there = {"torch": "2.13.0", "numpy": ""}
    found = lacking(["opacus>=1.6", "pyyaml"], there, Target())
    assert found["opacus"] == version("opacus")
    assert {"pyyaml", "opt-einsum"} <= found.keys()
    # of PyTorch alone
    assert not found.keys() & {"torch", "numpy", "jinja2", "networkx"}
    with pytest.raises(RuntimeError, match=r"torch: there is 2\.3\.0, and the project needs torch>=2\.11"):
        lacking(["torch>=2.11"], {"torch": "2.3.0"}, Target())
    with pytest.raises(RuntimeError, match="no-such-package: not installed here"):
        lacking(["no-such-package"], there, Target())
    # an extra, and a requirement of another Python
    assert "ray" in lacking(["flwr[simulation]"], there, Target())
    assert "ray" not in lacking(["flwr"], there, Target())


def place(folder: Path, seconds: float = 600.0) -> Place:
    return Place(folder, "cpu", tiny=True, deadline=time.monotonic() + seconds)


def test_what_is_done_is_not_done_again_and_what_fails_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    kept: dict[str, Any] = {}

    def item(name: str, error: Exception | None = None) -> Item:
        def measure(_: Place) -> dict[str, Any]:
            asked.append(name)
            if error is not None:
                raise error
            return {"seconds": 1.0}

        return Item(name, 1.0, measure)

    items = [item("old"), item("broken", RuntimeError("no memory")), item("long", Unfinished()), item("new")]
    remaining = run_sequence(items, place(tmp_path), {"old"}, kept.__setitem__)
    assert asked == ["broken", "long", "new"]
    assert kept == {"new": {"seconds": 1.0}}
    assert remaining == ["broken", "long"]
    told = capsys.readouterr()
    assert "broken: failed: no memory" in told.err
    assert "long: stopped; the next call goes on" in told.out


def test_a_run_that_does_not_fit_is_left_for_the_next_call(tmp_path: Path) -> None:
    short = Place(tmp_path, "cpu", tiny=False, deadline=time.monotonic() + 3 * GRACE)
    asked: list[str] = []
    items = [
        Item("long", 60.0, lambda _: asked.append("long") or {}),
        Item("lasting", 60.0, lambda _: asked.append("lasting") or {}, lasting=True),
    ]
    assert run_sequence(items, short, set(), lambda name, found: None) == ["long"]
    assert asked == ["lasting"]


def test_a_run_is_interrupted_so_that_it_can_keep_what_it_has(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    program = (
        "import pathlib, signal, sys, time\n"
        # a shell that starts the tests in the background has told its children to ignore it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[1]).write_text('checkpoint')\n    sys.exit(1)\n"
    )
    for seconds in (1.5, 6.0, 24.0):  # a busy machine needs longer to start Python
        with pytest.raises(Unfinished):
            place(tmp_path, GRACE + seconds).python("-c", program, str(kept))
        if kept.exists():
            break
    assert kept.read_text() == "checkpoint"
    with pytest.raises(RuntimeError, match=r"exit code 3: why"):
        place(tmp_path).python("-c", "import sys; sys.stderr.write('why'); sys.exit(3)")


def test_the_most_valuable_runs_come_first() -> None:
    names = [item.name for item in SEQUENCE]
    assert names[0] == "training resnet18, float32, recorded steps"
    assert names.index("analytic_cifar100, seed 1") < names.index("pp_fcil_cifar100_t10, seed 1")
    assert names.index("pp_fcil_cifar100_t5, seed 1") < names.index("pp_fcil_cifar100_t10, seed 2")
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_a_trial_in_miniature_runs_one_of_each_kind_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [
        "run",
        "--device",
        "cpu",
        "--tiny",
        "--store",
        str(tmp_path),
        "--results",
        str(tmp_path / "found"),
    ]
    kinds = ("bfloat16, recorded", "w3, 10 sites", "analytic", "pp_fcil_cifar100_t5, seed 1")
    for only in kinds:
        assert main([*call, "--only", only]) == 0
    [path] = (tmp_path / "found").glob("*.jsonl")
    entries = page.read(path)
    assert len(entries) == len(kinds)
    assert all(entry["tiny"] for entry in entries)
    assert path.with_suffix(".md").read_text() == page.as_markdown(entries)
    assert "images a second; update 0.0e+00 from that of plain steps" in page.as_markdown(entries)
    capsys.readouterr()
    main([*call, "--only", "analytic"])
    assert "1 of 1 runs measured" in capsys.readouterr().out
    assert page.read(path) == entries


def test_help_needs_nothing_that_is_not_in_the_standard_library() -> None:
    code = (
        "import sys; from benchmarks.gpu.__main__ import main\n"
        "try: main(['receive', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'numpy', 'torch', 'pydantic', 'yaml', 'flwr'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

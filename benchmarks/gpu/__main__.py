"""Measuring on a box with a GPU: `python -m benchmarks.gpu COMMAND`.

pack     here, with a package index: wheels that the box lacks and data, in parts that can be carried
receive  there: keep one part; with the last one, install the wheels and put the data in their place
run      there: measure what is not measured yet, for as long as one call may take
list     what is measured, and what remains

The box needs a checkout of this repository, Python with PyTorch, and no network. docs/performance.md.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import parts

ROOT = Path(__file__).resolve().parents[2]
STORE = Path("~/.cache/perennial/gpu").expanduser()


def main(words: list[str]) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack")
    pack.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    pack.add_argument("--part-mib", type=float, default=60.0, help="size of a part")
    pack.add_argument("--python", default="3.12", help="version on the box")
    pack.add_argument("--there", type=Path, help="output of `pip list --format=freeze` on the box")
    pack.add_argument("--data", type=Path, nargs="*", default=[], help="files for the folder data")
    pack.add_argument("--extras", nargs="*", default=["server", "pretrained"])
    receive = commands.add_parser("receive")
    receive.add_argument("parts", type=Path, nargs="+")
    for command in ("run", "list"):
        sub = commands.add_parser(command)
        sub.add_argument("--device", default="cuda")
        sub.add_argument("--tiny", action="store_true", help="everything in miniature, as a trial")
        sub.add_argument("--results", type=Path)
        sub.add_argument("--minutes", type=float, default=10.0, help="length of this call")
        sub.add_argument("--only", default="", help="runs whose name has this in it")
    for command in commands.choices.values():
        command.add_argument("--store", type=Path, default=STORE, help="folder on the box for everything")
    arguments = parser.parse_args(words)
    return {"pack": _pack, "receive": _receive, "run": _run, "list": _run}[arguments.command](arguments)


def _pack(arguments: argparse.Namespace) -> int:
    import shutil

    from benchmarks.gpu.wheels import Target, download, installed_there

    there = installed_there(arguments.there.read_text()) if arguments.there else {}
    with tempfile.TemporaryDirectory(prefix="perennial-gpu-") as folder:
        everything = Path(folder) / "everything"
        wheels = download(everything / "wheels", there, Target(arguments.python), arguments.extras)
        for path in arguments.data:
            (everything / "data").mkdir(exist_ok=True)
            shutil.copy(path, everything / "data" / path.name)
        found = parts.cut(everything, arguments.out, int(arguments.part_mib * 2**20))
    print(f"{len(wheels)} wheels, {len(arguments.data)} data files: {len(found)} parts in {arguments.out}")
    return 0


def _receive(arguments: argparse.Namespace) -> int:
    store: Path = arguments.store
    missing = [parts.receive(part, store) for part in arguments.parts][-1]
    if missing:
        print(f"missing still: {', '.join(f'part-{number:02d}' for number in missing)}")
        return 0
    wheels = sorted(map(str, (store / "wheels").glob("*.whl")))
    if wheels:
        options = ("--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(store / "site"))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
    print(f"all parts are there: {store}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    store: Path = arguments.store
    start = time.monotonic()
    if (store / "site").is_dir():
        sys.path.insert(0, str(store / "site"))
    import json

    import torch

    from benchmarks.environment import machine, versions
    from benchmarks.gpu import page
    from benchmarks.gpu.sequence import SEQUENCE, Place, run_sequence
    from perennial.foundation.files import replace_file

    gpu = "" if arguments.device == "cpu" else torch.cuda.get_device_name()
    where = machine(gpu)
    results: Path = arguments.results or (store / "trial" if arguments.tiny else page.RESULTS)
    path = results / f"{page.slug(gpu or 'a processor')}.jsonl"
    done = {entry["run"] for entry in page.read(path) if entry["tiny"] == arguments.tiny}
    items = [item for item in SEQUENCE if arguments.only in item.name]
    if arguments.command == "list":
        for item in items:
            print(f"{'done' if item.name in done else f'{item.minutes:g} min'}: {item.name}")
        return 0
    results.mkdir(parents=True, exist_ok=True)

    def keep(name: str, found: dict[str, Any]) -> None:
        entry = {
            "run": name,
            "tiny": arguments.tiny,
            "found": found,
            "machine": where,
            "versions": versions(),
        }
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        replace_file(path.with_suffix(".md"), page.as_markdown(page.read(path)).encode(), mode=0o644)

    place = Place(store, arguments.device, arguments.tiny, start + 60 * arguments.minutes)
    remaining = run_sequence(items, place, done, keep)
    print(f"{len(items) - len(remaining)} of {len(items)} runs measured, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

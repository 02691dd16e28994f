"""From a hospital's files to a report by docs/your_data.md alone: whether it works, and how long it takes.

`python -m benchmarks.first_report` writes public data sets out as a hospital would have them, class
folders of images and a CSV file, and types the page's first commands on them. results/first_report.json and
.md have the seconds of each command, what the model reached, and how long a person reads and types.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.environment import machine, versions
from benchmarks.table import RESULTS, ROOT
from perennial.data.config import DataConfig
from perennial.data.samples import Samples
from perennial.data.sources import load

SHARED = ROOT.parent / "shared" / "data"
PAGE = ROOT / "docs" / "your_data.md"
RECORD, SHOWN = RESULTS / "first_report.json", RESULTS / "first_report.md"
COMMANDS = re.compile(r"```sh\n(.*?)```", re.DOTALL)
WORDS_A_MINUTE, CHARACTERS_A_MINUTE = 200, 200
"""How fast a person reads a page of instructions, and types a command: both on the slow side."""
SLOWEST = 600.0
"""Seconds after which a command counts as too slow."""


@dataclass(frozen=True)
class Files:
    """Images to write out.

    options: of DataConfig. most: how many images. sites: whether folders of sites lie above those of classes.
    """

    options: dict[str, Any]
    most: int
    sites: bool = False


def _pack(name: str) -> dict[str, Any]:
    return {"source": "pack", "path": str(SHARED / name)}


IMAGES = {
    "digits": Files({"source": "digits"}, 1797),
    "Fashion-MNIST": Files(_pack("fashion_mnist.webp.zip"), 3000),
    "HAM10000, 32 px": Files(_pack("ham10000_32.webp.zip"), 3000, sites=True),
    "HAM10000, 128 x 96 px": Files(_pack("ham10000_128.webp.zip"), 1000, sites=True),
    "COIL-20": Files({"source": "npz", "path": str(SHARED / "coil20.npz")}, 1440),
}
TABLES = {"heart disease of four hospitals": (SHARED / "heart_disease_4_hospitals.csv", "diagnosis")}


def write_images(samples: Samples, classes: tuple[str, ...], files: Files, folder: Path) -> int:
    """PNG files in class folders, below a folder for each site where the data say whose they are."""
    rows = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1))[: files.most].tolist()
    for row in rows:
        kind = classes[int(samples.y[row])].replace("/", "-")
        site = samples.site_names[int(samples.site[row])] if files.sites and samples.site is not None else ""
        place = folder / site / kind
        place.mkdir(parents=True, exist_ok=True)
        pixels = samples.x[row]
        if pixels.dtype != torch.uint8:
            pixels = (pixels * (255 / float(samples.x.max()))).round().to(torch.uint8)
        image = pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy()
        Image.fromarray(image).save(place / f"{row:05d}.png")
    return len(rows)


def typed(folder: Path, commands: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each command as a person types it, with its seconds; and the summary of the run that they made."""
    program = Path(sys.executable).parent / "perennial"
    done = []
    for command in commands:
        started = time.monotonic()
        arguments = [str(program), *command.split()[1:]]
        found = subprocess.run(
            arguments, cwd=folder, capture_output=True, text=True, check=False, timeout=SLOWEST
        )
        if found.returncode:
            raise RuntimeError(f"{command}: {found.stdout}{found.stderr}")
        done.append({"command": command, "seconds": round(time.monotonic() - started, 1)})
    (run,) = (folder / "runs").iterdir()
    assert (run / "report.html").stat().st_size > 0
    return done, json.loads((run / "summary.json").read_text())


def first_commands() -> list[str]:
    """The commands of the page's first block."""
    found = COMMANDS.search(PAGE.read_text())
    assert found is not None
    return found[1].strip().splitlines()


def reading() -> dict[str, Any]:
    """Words of the page until its first section ends, and characters of its first commands, in minutes."""
    words = len(PAGE.read_text().split("\n## ")[0].split())
    characters = sum(map(len, first_commands()))
    minutes = words / WORDS_A_MINUTE + characters / CHARACTERS_A_MINUTE
    return {"words": words, "characters": characters, "minutes": round(minutes, 1)}


def measure(name: str) -> dict[str, Any]:
    """One data set, from its files to the report."""
    with tempfile.TemporaryDirectory(prefix="perennial-first-") as temporary:
        folder = Path(temporary)
        commands = first_commands()
        if name in TABLES:
            path, label = TABLES[name]
            (folder / "skin.csv").write_bytes(path.read_bytes())
            commands[0] = commands[0].replace(" skin ", f" skin.csv --label {label} ")
            count = len(path.read_text().splitlines()) - 1
        else:
            files = IMAGES[name]
            source = load(DataConfig.model_validate({"sites": 1, **files.options}), seed=1)
            count = write_images(source.train, source.classes, files, folder / "skin")
        done, summary = typed(folder, commands)
    return {
        "data": name,
        "samples": count,
        "sites": len(summary["sites"]),
        "commands": done,
        "seconds": round(sum(each["seconds"] for each in done), 1),
        "final_accuracy": summary["final_accuracy"],
        "balanced_accuracy": summary["balanced_accuracy"][-1],
    }


def page(record: dict[str, Any]) -> str:
    """The record as a page."""
    read, commands = record["reading"], ", ".join(record["typed"])
    lines = [
        "# From files to a first report",
        "",
        "`python -m benchmarks.first_report`. Public data, written out as a hospital has them "
        "(class folders of PNG files, below a folder for each clinic where the data name them; one CSV "
        f"file), and the commands of the first block of `docs/your_data.md` as they stand: {commands}. "
        f"A person reads {read['words']} words and types {read['characters']} characters: {read['minutes']} "
        f"minutes at {WORDS_A_MINUTE} words and {CHARACTERS_A_MINUTE} characters a minute. Seconds are the "
        "computer's, of all three commands.",
        "",
        "| data | samples | sites | seconds | accuracy | balanced accuracy |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row['data']} | {row['samples']:,} | {row['sites']} | {row['seconds']:.0f} | "
            f"{100 * row['final_accuracy']:.1f} | {100 * row['balanced_accuracy']:.1f} |"
            for row in record["rows"]
        ),
        "",
        f"One run each, seed 1, closed form as `init` proposes it. {record['machine']}; "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all data sets and write both files."""
    rows = []
    for name in [*IMAGES, *TABLES]:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    record = {
        "reading": reading(),
        "typed": [f"`{command}`" for command in first_commands()],
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    SHOWN.write_text(page(record))


if __name__ == "__main__":
    main()

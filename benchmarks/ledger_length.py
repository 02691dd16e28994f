"""What one charge costs in a ledger of a thousand lines and in one of ten million, in turns.

    python -m benchmarks.ledger_length [LINES...]   writes benchmarks/results/ledger_length.json

The ledgers are written as charges would have left them, without charging each: the chain, the totals and the
tip are those of the real thing, and a charge checks them. Ten million lines take 4 GB.
"""

import json
import os
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import machine, versions
from perennial.privacy import ledger_lines
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger, Limit
from perennial.privacy.ledger_tip import Tip, TipPosition, guarantee, listed

RESULTS = Path(__file__).parent / "results" / "ledger_length.json"
LINES = (1_000, 100_000, 10_000_000)
CHARGES = 60
LIMIT = Limit(epsilon=1e12, delta=1e-5)
"""A budget that is asked at each charge and never refuses."""
PIECE = 50_000
"""Lines that are written at once."""


def update(run: str) -> Entry:
    """The release that all of them are."""
    return Entry(
        run=run,
        experiment="e" * 64,
        recipient="server",
        kind="update",
        unit="sample",
        relation="add_remove",
        mechanism="gaussian",
        noise_multiplier=4.0,
        sample_rate=0.1,
        steps=20,
        time="2026-01-01T00:00:00+00:00",
    )


def write_ledger(folder: Path, lines: int) -> Ledger:
    """A ledger of so many releases, as its charges would have left it."""
    ledger = Ledger(folder)
    folder.mkdir()
    of_all = guarantee(update(""))
    # the totals as listed() has them, with the count left open
    before, after = json.dumps(listed({of_all: 10**9}), separators=(",", ":")).split("1000000000")
    body = json.dumps(update("r" * 16).to_json(), separators=(",", ":"))[1:]
    last, length, size = TipPosition().last, 0, 0
    with ledger.path.open("wb") as file:
        piece: list[bytes] = []
        for count in range(1, lines + 1):
            totals = sha256(f"{before}{count}{after}".encode()).hexdigest()
            line = f'{{"previous":"{last}","totals":"{totals}",{body}'.encode()
            last, length = sha256(line).hexdigest(), len(line) + 1
            size += length
            piece.append(line)
            if len(piece) == PIECE or count == lines:
                file.write(b"\n".join(piece) + b"\n")
                piece.clear()
        os.fsync(file.fileno())
    Tip(TipPosition(size, lines, last), {of_all: lines}, length).write(ledger.beside, durable=True)
    return ledger


def timed_charge(ledger: Ledger) -> tuple[float, int]:
    """(seconds of one charge, bytes of the ledger that it read)."""
    read, pread = [0], os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        data = pread(descriptor, size, offset)
        read[0] += len(data)
        return data

    ledger_lines.os.pread = counted
    start = time.perf_counter()
    try:
        ledger.charge(update("f" * 16), LIMIT)
    finally:
        seconds = time.perf_counter() - start
        ledger_lines.os.pread = pread
    return seconds, read[0]


def measured(lengths: tuple[int, ...], charges: int) -> list[dict[str, Any]]:
    """One row for each length. Charges alternate, so that background load falls on all lengths alike."""
    with tempfile.TemporaryDirectory(prefix="perennial-ledger-") as folder:
        ledgers = {lines: write_ledger(Path(folder) / str(lines), lines) for lines in lengths}
        sizes = {lines: ledger.path.stat().st_size for lines, ledger in ledgers.items()}
        found: dict[int, list[tuple[float, int]]] = {lines: [] for lines in lengths}
        for _ in range(charges):
            for lines, ledger in ledgers.items():
                found[lines].append(timed_charge(ledger))
        releases = {lines: ledger.cost(1e-5, "rdp").releases for lines, ledger in ledgers.items()}
    return [
        {
            "lines": lines,
            "bytes": sizes[lines],
            "charges": charges,
            "median_seconds": round(median(seconds for seconds, _ in found[lines]), 5),
            "most_bytes_read": max(read for _, read in found[lines]),
            "releases_after": releases[lines],
        }
        for lines in lengths
    ]


def main() -> None:
    lengths = tuple(int(text) for text in sys.argv[1:]) or LINES
    content = {"rows": measured(lengths, CHARGES), "versions": versions(()), "measured_on": machine()}
    print(json.dumps(content, indent=1))
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Processor time of `perennial run` on the quickstart: `python -m benchmarks.start_time` writes its result.

Fresh processes, in turn, with Python's bytecode on the disk as an installed package has it: ten pairs before
the first round against `import torch` alone, ten times from the last round to the exit, ten times the report
by itself, and ten pairs with against without each device that shortens a run, of one round a task.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = 10
WATCH = """
import os, sys, time
import perennial.cli.start_up as start_up
found = start_up.import_run
def import_and_watch():
    run_command = found()
    from perennial.server.rounds import Rounds
    Rounds.run = watched(Rounds.run)
    return run_command
start_up.import_run = import_and_watch
"""
FIRST = """
def watched(run):
    def end(self, *given, **named):
        print(time.process_time(), flush=True)
        os._exit(0)
    return end
"""
LAST = """
def watched(run):
    def tell(self, *given, **named):
        outcome = run(self, *given, **named)
        print(time.process_time(), file=sys.stderr, flush=True)
        return outcome
    return tell
"""
RUN = """
import sys
sys.argv = ["perennial", "run", "experiments/quickstart.yaml", "--runs", {runs!r}, "--set", "tasks.rounds=1"]
from perennial.cli.main import main
main()
"""
TORCH = "import torch, time; print(time.process_time())"
REPORT = """
import time
from pathlib import Path
import perennial.cli.run
begun = time.process_time()
from perennial.server.report.write import write_report
write_report(Path({runs!r}) / "quickstart")
print(time.process_time() - begun)
"""
NOTHING = "from contextlib import nullcontext\n"
WITHOUT = {
    "garbage": NOTHING + "import perennial.foundation.allocator as m; m.permanent = nullcontext\n",
    "allocator": "import perennial.foundation.allocator as m; m.keep_freed_memory = int\n",
}


def run_code(code: str, runs: str) -> tuple[float, float]:
    """Run code in a fresh process: (the last processor time that it tells, or 0; the one that it took)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code.replace("{runs!r}", repr(runs))]
    own["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = done.stderr.split() or done.stdout.split()
    told = float(words[-1]) if words and words[-1].replace(".", "").isdigit() else 0.0
    return told, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(code: str) -> tuple[float, float]:
    """run_code() with a folder for runs of its own."""
    with tempfile.TemporaryDirectory() as runs:
        return run_code(code, runs)


def compare(one: str, other: str, figure: int) -> dict[str, object]:
    """Ratios of one over other in PAIRS pairs, whose order alternates. figure: 0 told, 1 took."""
    pairs = []
    for number in range(PAIRS):
        order = (one, other) if number % 2 == 0 else (other, one)
        found = {code: measure(code)[figure] for code in order}
        pairs.append([round(found[one], 3), round(found[other], 3)])
    ratios = [first / second for first, second in pairs]
    better = sum(first < second for first, second in pairs)
    return {"median_ratio": round(statistics.median(ratios), 3), "lower_in": better, "pairs": pairs}


def time_the_end() -> dict[str, object]:
    """Processor seconds from the last round to the exit, and of the report in a process that has run."""
    ends, reports = [], []
    with tempfile.TemporaryDirectory() as runs:
        run_code(RUN, runs)
        for _ in range(PAIRS):
            told, took = measure(WATCH + LAST + RUN)
            ends.append(round(took - told, 3))
            reports.append(round(run_code(REPORT, runs)[0], 3))
    return {
        "seconds_after_the_last_round": statistics.median(ends),
        "seconds_of_the_report": statistics.median(reports),
        "ends": ends,
        "reports": reports,
    }


if __name__ == "__main__":
    path = ROOT / "benchmarks" / "results" / "start_time.json"
    asked = sys.argv[1:] or ["begin", "end", *WITHOUT]
    result = json.loads(path.read_text()) if sys.argv[1:] else {}
    for name in asked:
        if name == "begin":
            measure(WATCH + FIRST + RUN)  # writes the bytecode
            result["before_the_first_round_over_import_torch"] = compare(WATCH + FIRST + RUN, TORCH, 0)
        elif name == "end":
            result["end"] = time_the_end()
        else:
            result[f"with_over_without_{name}"] = compare(RUN, WITHOUT[name] + RUN, 1)
        path.write_text(json.dumps(result) + "\n")
        print(name, json.dumps(result), flush=True)

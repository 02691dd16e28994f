"""Processor time of `perennial run` on the quickstart: `python -m benchmarks.start_time` writes its result.

Ten pairs of fresh processes, in turn: before the first round against `import torch` alone, and from start to
exit with everything against one device that shortens start or end left out.
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
# stops at the first round's beginning, and says how much processor time the process took until then
BEGIN = """
import importlib.util, os, sys, time
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "perennial.server.rounds":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def load_and_watch(module):
            load(module)
            module.Rounds.run = end
        spec.loader.exec_module = load_and_watch
        return spec
def end(self):
    print(time.process_time(), flush=True)
    os._exit(0)
sys.meta_path.insert(0, Watch())
"""
RUN = """
import sys
sys.argv = ["perennial", "run", "experiments/quickstart.yaml", "--runs", {runs!r}]
from perennial.cli.main import main
main()
"""
TORCH = "import torch, time; print(time.process_time())"
NOTHING = "from contextlib import nullcontext\n"
WITHOUT = {
    "garbage": NOTHING + "import perennial.foundation.garbage as m; m.permanent = nullcontext\n",
    "process_end": NOTHING + "import perennial.foundation.process_end as m; m.ends_in_one_go = nullcontext\n",
    "allocator": "import perennial.foundation.allocator as m; m.keep_freed_memory = int\n",
}


def measure(code: str) -> dict[str, float]:
    """Run code in a fresh process: processor seconds that it tells, if it does, and that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as runs:
        own = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code.replace("{runs!r}", repr(runs))]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = done.stdout.split()[-1] if done.stdout else ""
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"told": float(told) if told.replace(".", "").isdigit() else 0, "processor": processor}


def compare(one: str, other: str, figure: str) -> dict[str, object]:
    """Ratios of one over other in PAIRS pairs, whose order alternates."""
    pairs = []
    for number in range(PAIRS):
        order = (one, other) if number % 2 == 0 else (other, one)
        found = {code: measure(code)[figure] for code in order}
        pairs.append((round(found[one], 3), round(found[other], 3)))
    ratios = [first / second for first, second in pairs]
    better = sum(first < second for first, second in pairs)
    return {"median_ratio": round(statistics.median(ratios), 3), "lower_in": better, "pairs": pairs}


if __name__ == "__main__":
    result = {"before_the_first_round_over_import_torch": compare(BEGIN + RUN, TORCH, "told")}
    for name, without in WITHOUT.items():
        result[f"with_over_without_{name}"] = compare(RUN, without + RUN, "processor")
        print(name, result[f"with_over_without_{name}"])
    (ROOT / "benchmarks" / "results" / "start_time.json").write_text(json.dumps(result, indent=1) + "\n")

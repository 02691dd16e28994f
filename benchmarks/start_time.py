"""Processor time of commands, in fresh processes; each writes its result.

`python -m benchmarks.start_time`: `perennial run` on the quickstart, in ten pairs: before the first round
against `import torch` alone, and from start to exit with everything against one device that shortens start or
end left out.
`python -m benchmarks.start_time deploy`: an operator's commands while a SuperLink serves on loopback.
"""

import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import machine, versions
from benchmarks.processes import measured

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


def measure_operator() -> dict[str, object]:
    """Processor seconds of `deploy submit` and `deploy status`, with two runs that wait for their sites."""
    perennial = ("-m", "perennial.cli.main", "deploy")
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    fleet, control = (str(probe.getsockname()[1]) for probe in probes)
    for probe in probes:
        probe.close()
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "federation")
        ports = ("--fleet-port", fleet, "--control-port", control)
        measured(*perennial, "init", folder, "--host", "localhost", "--runtime", "process", *ports)
        log = subprocess.DEVNULL
        serving = subprocess.Popen([sys.executable, *perennial, "start", folder], stdout=log, stderr=log)
        try:
            asked = [sys.executable, *perennial, "health", folder]
            while subprocess.run(asked, stdout=log, stderr=log, check=False).returncode:
                time.sleep(1)
            at = ("--folder", folder)
            submit = [
                (*perennial, "submit", "experiments/quickstart.yaml", *at, "--name", f"run-{n}") for n in "12"
            ]
            commands = {
                "submit": submit,
                "submit_again": submit,
                "status": [(*perennial, "status", *at)] * PAIRS,
            }
            found = {
                name: [round(measured(*command).cpu_seconds, 2) for command in each]
                for name, each in commands.items()
            }
        finally:
            serving.terminate()
            serving.wait()
    return {"machine": machine(), "versions": versions(("flwr",)), "processor_seconds": found}


def write(name: str, result: object) -> None:
    (ROOT / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["deploy"]:
        write("deploy_commands", measure_operator())
        sys.exit()
    result = {"before_the_first_round_over_import_torch": compare(BEGIN + RUN, TORCH, "told")}
    for name, without in WITHOUT.items():
        result[f"with_over_without_{name}"] = compare(RUN, without + RUN, "processor")
        print(name, result[f"with_over_without_{name}"])
    write("start_time", result)

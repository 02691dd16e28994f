"""The workload by `perennial run`, the command itself: perennial_run WORKLOAD RUNS [OPTION...].

Prints what the other adapters print; the steps are those that sites tell, counted where replies are checked.
"""

import gc
import json
import sys
from pathlib import Path

from perennial.cli.main import app
from perennial.foundation.garbage import permanent

with permanent():
    from perennial.benchmarks.workloads import write_workload
    from perennial.cli.run import run_command
    from perennial.strategies.round.gate import Gate


def main(workload: str, runs: Path, options: list[str]) -> None:
    assert run_command
    steps, admit = 0, Gate.admit

    def counted(self: Gate, *arguments: object) -> object:
        nonlocal steps
        reply = admit(self, *arguments)  # pyright: ignore[reportArgumentType]
        steps += reply.steps
        return reply

    Gate.admit = counted  # pyright: ignore[reportAttributeAccessIssue]
    command = ["run", str(write_workload(workload, runs)), "--runs", str(runs), "--name", "timed"]
    app([*command, "--device", "cpu", *options], standalone_mode=False)
    folder = runs / "timed"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    if any(event["dropped"] or event["refused"] for event in rounds):
        raise RuntimeError(f"a site failed in {workload}: the time means nothing")
    found = {
        "seconds": sum(event["seconds"] for event in rounds),
        "steps": steps,
        "accuracy": json.loads((folder / "summary.json").read_text())["final_accuracy"],
    }
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    # as the command's own entry point does
    gc.freeze()

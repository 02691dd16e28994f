"""The workload by `perennial run`, the command itself: perennial_run EXPERIMENT RUNS [OPTION...].

Prints what the other adapters print; the steps are those that sites tell, counted where replies are checked.
"""

import json
import sys
from pathlib import Path

from perennial.cli.main import app
from perennial.cli.start_up import import_run


def main(experiment: Path, runs: Path, options: list[str]) -> None:
    import_run()
    from benchmarks.workloads import failed
    from perennial.strategies.round.gate import Gate

    steps, admit = 0, Gate.admit

    def counted(self: Gate, *arguments: object) -> object:
        nonlocal steps
        reply = admit(self, *arguments)  # pyright: ignore[reportArgumentType]
        steps += reply.steps
        return reply

    Gate.admit = counted  # pyright: ignore[reportAttributeAccessIssue]
    command = ["run", str(experiment), "--runs", str(runs), "--name", "timed"]
    app([*command, "--device", "cpu", *options], standalone_mode=False)
    folder = runs / "timed"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    if failed(rounds):
        raise RuntimeError(f"a site failed in {experiment.stem}: the time means nothing")
    found = {
        "seconds": sum(event["seconds"] for event in rounds),
        "steps": steps,
        "accuracy": json.loads((folder / "summary.json").read_text())["final_accuracy"],
    }
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

"""One workload in the in-process engine: `engine_run w1 --runs DIR` prints JSON.

seconds, cpu_seconds: of the rounds, cpu of this process alone. steps: local steps, as the sites tell them.
accuracy: of the last model on the server's test set.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.workloads import failed, write_workload
from perennial.cli.start_up import import_run
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.protocol.messages import TrainReply
from perennial.strategies.round.gate import Admitted, Gate


def main(
    workload: str,
    runs: Annotated[Path, typer.Option()],
    workers: Annotated[int, typer.Option()] = 1,
    cohort: Annotated[str, typer.Option(help="a number, or auto")] = "1",
    changes: Annotated[str, typer.Option(help="KEY=VALUE;KEY=VALUE")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "cpu",
    gpu: Annotated[str, typer.Option(help="graphs, benchmark, or both with a comma between")] = "",
) -> None:
    """Run it and print what it took."""
    # as the command does, which leaves its imports out of garbage collection
    import_run()
    steps = 0
    admitted = Gate._build_admitted

    def counted(self: Gate, site: str, reply: TrainReply) -> Admitted:
        nonlocal steps
        steps += reply.steps
        return admitted(self, site, reply)

    Gate._build_admitted = counted
    runs.mkdir(parents=True, exist_ok=True)
    experiment = write_workload(workload, runs)
    settings = RunSettings(str(experiment), changes, runs=str(runs), name="timed", device=device, gpu=gpu)
    rounds: list[dict[str, Any]] = []
    cpu: list[float] = []

    def listener(event: dict[str, Any]) -> None:
        if event["event"] in ("task_started", "round"):
            cpu.append(time.process_time())
        if event["event"] == "round":
            rounds.append(event)

    summary = run_in_process(settings, workers, listener, "auto" if cohort == "auto" else int(cohort))
    if failed(rounds):
        raise RuntimeError(f"a site failed in {workload}: the time means nothing")
    typer.echo(
        json.dumps(
            {
                "seconds": sum(event["seconds"] for event in rounds),
                "cpu_seconds": cpu[-1] - cpu[0],
                "steps": steps,
                "accuracy": summary["final_accuracy"],
                "model": str(runs / "timed" / "model.safetensors"),
                "model_sha256": summary["model_sha256"],
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)

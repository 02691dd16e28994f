"""A federation on this machine, by the commands of its people: one site on the device, one on a processor.

Three rounds of DP-SGD over the wire. A site of `device: cuda` refuses where PyTorch sees no GPU, so its
replies were computed there; which of its processes hold the GPU's files shows that none does before a fork.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from perennial.deploy.control import list_runs
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.operations import COMPLETED, last_run

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 115.0
"""Most that all of it may take: about 90 for the run."""
ON_DEVICE, ON_CPU = SITES = ("site-0", "site-1")
RUN = "over-the-wire"
EXPERIMENT = {
    "name": RUN,
    "seed": 1,
    "data": {"source": "digits", "sites": 2, "test_fraction": 0.2},
    "tasks": {"count": 1, "rounds": 3},
    "model": {"name": "small_cnn", "norm": "group"},
    "rounds": {"wait_for": 2, "deadline": 3 * SECONDS},
    "learner": {"preset": "none", "epochs": 4, "batch_size": 140, "optimizer": {"lr": 0.5}},
    "privacy": {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.2},
    "evaluation": {"federated": False},
}
# a SuperNode must not be able to write the folder of apps, which root can, unless it gives this capability up
BOUND = ("setpriv", "--inh-caps=-dac_override", "--bounding-set=-dac_override", "--")
UNBOUND = (
    "import perennial.deploy.supernode as node, pathlib, sys; node.require_read_only = lambda *_: None; "
    "node.start_supernode(pathlib.Path(sys.argv[1]))"
)
TAIL = 2500


def time_federation(device: str, tiny: bool) -> dict[str, Any]:
    """Run it: seconds, devices, epsilon, accuracy; or what failed, with the ends of all logs.

    tiny: a round has fewer steps, and the waits are longer, for a slow machine.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        started: dict[str, subprocess.Popen[bytes]] = {}
        stack.callback(lambda: [_kill(process) for process in started.values()])
        begun, found = time.monotonic(), dict[str, Any]()
        until = begun + SECONDS * (4 if tiny else 1)
        try:
            found |= _set_up(folder, device, tiny, started, until)
            found["seconds_of_set_up"] = round(time.monotonic() - begun, 1)
            found["gpu_held_by"] = _wait_for_run(folder, started, until)
            return found | _read_results(folder)
        except (Exception, SystemExit) as error:
            return found | {"failed": f"{type(error).__name__}: {error}"[-TAIL:], "logs": _read_logs(folder)}


def _set_up(
    folder: Path, device: str, tiny: bool, started: dict[str, "subprocess.Popen[bytes]"], until: float
) -> dict[str, Any]:
    """Make the federation, submit the run, and start its sites; the devices that `perennial check` tells."""
    fleet, control, *ports = _find_free_ports(2 + len(SITES))
    operator, experiment = folder / "federation", folder / "experiment.yaml"
    learner = {**EXPERIMENT["learner"], "epochs": 1 if tiny else 4}
    experiment.write_text(yaml.safe_dump({**EXPERIMENT, "learner": learner}))
    _type("deploy", "init", operator, "--host", "127.0.0.1", "--runtime", "process", "--fleet-port", fleet)
    _edit(operator / "deploy.yaml", fleet_host="127.0.0.1", control_port=control)

    def start(name: str, *command: object) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            words = [*map(str, command)]
            started[name] = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    perennial = (sys.executable, "-m", "perennial.cli.main")
    start("superlink", *perennial, "deploy", "start", operator)
    _wait("the SuperLink listens", lambda: _listens(fleet) and _listens(control), started, until)
    app, digest = _type("deploy", "stage", experiment, "--folder", operator).split()[-2:]
    pinned = os.getuid() != 0 or _works(*BOUND, "true")
    devices = dict[str, str]()
    for name, port, place in zip(SITES, ports, (device, "cpu"), strict=True):
        own = folder / name
        _type("site", "open", "--folder", own)
        _type("deploy", "add-site", name, own / "node.key.pub", "--folder", operator)
        _type("site", "open", operator / "bundles" / f"{name}.tar.gz", "--folder", own)
        # as it is shipped, but with a share of the experiment's data, and a larger budget
        policy = {"max_epsilon": 1000.0}
        _edit(own / "site.yaml", device=place, data=None, policy=policy, connection={"runtime_port": port})
        _type("site", "approve", app, digest, "--site", own / "site.yaml")
        devices[name] = re.findall(r" on (\w+):", _type("check", own / "site.yaml"))[0]
        bound = BOUND if pinned and os.getuid() == 0 else ()
        way = ("-m", "perennial.cli.main", "site", "start") if pinned else ("-c", UNBOUND)
        start(name, *bound, sys.executable, *way, own / "site.yaml")
    # whoever is asked for an app before these are there tries again half a minute later
    warm = [own / "state" / "process" / "warm" for own in (operator, *(folder / name for name in SITES))]
    _wait("apps can start", lambda: all(path.exists() for path in warm), started, until)
    _type("deploy", "submit", experiment, "--folder", operator)
    return {"devices": devices, "pinned": pinned}


def _wait_for_run(
    folder: Path, started: dict[str, "subprocess.Popen[bytes]"], until: float
) -> dict[str, dict[str, int]]:
    """Wait for its end; of each side, how many processes that last, and forks of one, held a GPU's files."""
    operator = OperatorFolder(folder / "federation")
    holders: dict[str, set[tuple[str, int]]] = {name: set() for name in started}

    def has_ended() -> bool:
        # a turn may take a second, and the SuperLink need not be asked as often
        for _ in range(5):
            for name, process in started.items():
                holders[name] |= _find_holders(process.pid)
            time.sleep(0.1)
        status = list_runs(operator)[last_run(operator, RUN)].status
        if status.startswith("finished") and status != COMPLETED:
            raise RuntimeError(f"the run: {status}")
        return status == COMPLETED

    _wait("the run ends", has_ended, started, until)
    kinds = {name: [kind for kind, _ in found] for name, found in holders.items()}
    return {name: {kind: found.count(kind) for kind in set(found)} for name, found in kinds.items()}


def _wait(
    what: str, check: Callable[[], bool], started: dict[str, "subprocess.Popen[bytes]"], until: float
) -> None:
    """Return once check() is true. Raises RuntimeError when it is too late, or a process has ended."""
    while not check():
        ended = [name for name, process in started.items() if process.poll() is not None]
        if ended or time.monotonic() > until:
            raise RuntimeError(f"waiting until {what}; ended: {', '.join(ended) or 'nobody'}")
        time.sleep(0.2)


def _find_holders(leader: int, files: str = "/dev/nvidia") -> set[tuple[str, int]]:
    """(`lasting` or `fork`, number) of the processes in a session that have one of a GPU's files open."""
    found = set[tuple[str, int]]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(process.name)) != leader:
                continue
            if any(os.readlink(file).startswith(files) for file in (process / "fd").iterdir()):
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                number = int(process.name)
                found.add(("lasting" if leader in (number, parent) else "fork", number))
    return found


def _read_results(folder: Path) -> dict[str, Any]:
    run = folder / "federation" / "state" / "runs" / RUN
    summary = json.loads((run / "summary.json").read_text())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    complete = [sorted(event["participants"]) == [*SITES] for event in rounds]
    return {
        "seconds_of_rounds": [event["seconds"] for event in rounds],
        "seconds_of_turns": {name: _time_turns(folder / name / "state" / "activity.jsonl") for name in SITES},
        "epsilon": summary["epsilon"]["value"],
        "final_accuracy": summary["final_accuracy"],
        "all_replied": complete == [True] * 3,
    }


def _time_turns(activity: Path) -> list[float]:
    """Seconds of each training, as the site itself noted them."""
    events = [json.loads(line) for line in activity.read_text().splitlines()]
    asked = {event["request"]: event["time"] for event in events if event.get("kind") == "train"}
    return [
        round(event["time"] - asked[event["request"]], 2)
        for event in events
        if event["event"] == "answered" and event["request"] in asked
    ]


def _read_logs(folder: Path) -> dict[str, str]:
    """The ends of what the processes, the run and the sites wrote."""
    paths = [*folder.glob("*.log"), *folder.glob("*/state/activity.jsonl")]
    paths += folder.glob("federation/state/runs/*/events.jsonl")
    return {str(path.relative_to(folder)): path.read_text(errors="replace")[-TAIL:] for path in paths}


def _type(*words: object) -> str:
    """Type a `perennial` command, in this process because each new one takes seconds; what it said."""
    from perennial.cli.main import app

    with redirect_stdout(StringIO()) as said:
        app([*map(str, words)], standalone_mode=False)
    return said.getvalue()


def _edit(path: Path, **changes: Any) -> None:
    """Change keys of a YAML file; mappings are merged."""
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(content))


def _find_free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, check=False).returncode == 0


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

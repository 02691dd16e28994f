"""The same question gets the bytes that a site released before, and the ledger is charged once."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.client import kept_reply, release
from perennial.client.door import keep_split_key
from perennial.config import charges
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import StateError
from perennial.privacy.ledger import Ledger
from perennial.privacy.released import Released
from perennial.server.checkpoint import CHECKPOINT, load_checkpoint
from perennial.server.releases import Releases
from perennial.strategies.round.gate import Gate

SITES = ("site-0", "site-1", "site-2")
EXPERIMENT: dict[str, Any] = {
    "name": "paid",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "classification": "ce"},
    "privacy": {"mode": "client_local", "clip_norm": 0.5, "noise_multiplier": 4.0},
    "evaluation": {"federated": True, "noise_multiplier": 20.0, "clip_counts": 5.0},
}


class Killed(BaseException):
    """Stands for SIGKILL of the server."""


def settings(folder: Path, **changes: Any) -> RunSettings:
    folder.mkdir(exist_ok=True)
    path = folder / "paid.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return RunSettings(str(path), runs=str(folder / "runs"))


def charged(folder: Path) -> dict[str, int]:
    return {site: len(Ledger(folder / "runs" / "paid" / "sites" / site).read_entries()) for site in SITES}


def killed_after(folder: Path, replies: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Run until the server has taken so many updates, and kill it before it notes anything of that round."""
    admit, seen = Gate.admit, 0

    def admitted(gate: Gate, *message: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == replies:
            raise Killed
        return admit(gate, *message)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Gate, "admit", admitted)
        run_in_process(settings(folder, **changes))


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_crash_of_the_server_costs_no_site_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cohort: int
) -> None:
    whole: dict[str, Any] = run_in_process(settings(tmp_path / "whole"), cohort=cohort)
    killed = tmp_path / "killed"
    admit = Gate.admit
    first: dict[tuple[str, int], bytes] = {}

    def seen(taken: Any) -> Any:
        content = b"".join(array.numpy().tobytes() for array in taken.update.values())
        # noise of a secure source never comes twice, so equal bytes are the same release
        assert first.setdefault((taken.site, load_round(killed)), content) == content
        if len(first) == 6 and not (killed / "stopped").exists():
            (killed / "stopped").touch()
            raise Killed
        return taken

    monkeypatch.setattr(Gate, "admit", lambda *given: seen(admit(*given)))
    together = Gate.admit_stack

    def stacked(gate: Gate, stack: Any, sites: Any) -> Any:
        taken, apart = together(gate, stack, sites)
        return [seen(each) for each in taken], apart

    monkeypatch.setattr(Gate, "admit_stack", stacked)
    with pytest.raises(Killed):
        run_in_process(settings(killed), cohort=cohort)
    again: dict[str, Any] = run_in_process(
        RunSettings(str(killed / "paid.yaml"), runs=str(killed / "runs"), resume="yes"), cohort=cohort
    )
    assert charged(killed) == charged(tmp_path / "whole")
    assert again["epsilon"]["value"] == whole["epsilon"]["value"]


def load_round(folder: Path) -> int:
    return load_checkpoint(folder / "runs" / "paid" / CHECKPOINT)[0].progress.round


def test_what_a_site_lost_is_paid_for_again_and_damage_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after(tmp_path, 6, monkeypatch)
    before = charged(tmp_path)
    kept = {site: sorted((tmp_path / "runs/paid/sites" / site).rglob("released/*")) for site in SITES}
    assert all(len(files) == 1 for files in kept.values()), "those of the newest round alone"
    kept["site-0"][0].unlink()
    data = bytearray(kept["site-1"][0].read_bytes())
    data[-3] ^= 1
    kept["site-1"][0].write_bytes(data)
    run_in_process(RunSettings(str(tmp_path / "paid.yaml"), runs=str(tmp_path / "runs"), resume="yes"))
    after, rounds = charged(tmp_path), 2
    # the second task's rounds, and two evaluations; what was lost or damaged is paid for once more
    rest = {site: after[site] - before[site] - rounds - 2 for site in SITES}
    assert rest == {"site-0": 1, "site-1": 1, "site-2": 0}


def test_another_question_or_another_policy_gets_another_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[kept_reply.KeptReply] = []
    read = kept_reply.KeptReply.read
    monkeypatch.setattr(kept_reply.KeptReply, "read", lambda self: (asked.append(self), read(self))[1])
    run_in_process(settings(tmp_path, tasks={"count": 1, "rounds": 2}))
    assert len({(place.path.parents[3].name, place.path.name) for place in asked}) == len(asked) == 9


def test_a_question_that_comes_while_it_is_answered_waits_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a server that was killed and asks again, while the site still trains for its first question."""
    answered_once, asked = kept_reply.answer_once, list[tuple[Any, Any, Any]]()

    def noted(site: Any, request: Any, answer: Any) -> Any:
        reply = answered_once(site, request, answer)
        asked.append((site, request, reply))
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(kept_reply, "answer_once", noted)
        run_in_process(settings(tmp_path, tasks={"count": 1, "rounds": 1}))
    site, request, reply = asked[0]
    for path in (tmp_path / "runs").rglob("released/*"):
        path.unlink()
    before, both_inside = len(site.identity.ledger.read_entries()), threading.Barrier(2)

    def answer() -> Any:
        # the two meet here unless one waits for the other
        with suppress(threading.BrokenBarrierError):
            both_inside.wait(0.3)
        release.pay(site.identity, Released(0, charges.price_update(site.experiment, request.run)))
        return reply

    with ThreadPoolExecutor(2) as both:
        replies: list[Any] = list(both.map(lambda _: kept_reply.answer_once(site, request, answer), range(2)))
    assert len(site.identity.ledger.read_entries()) == before + 1
    first, second = (b"".join(map(bytes, map(torch.Tensor.numpy, it.update.values()))) for it in replies)
    assert first == second


def test_the_door_of_a_deployed_site_does_not_wait_for_the_turn_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployed site holds each request to the run's split key, which takes a turn in the run's folder."""
    answered_once, first = kept_reply.answer_once, list[tuple[Any, Any]]()

    def noted(site: Any, request: Any, answer: Any) -> Any:
        first.append((site, request))
        return answered_once(site, request, answer)

    with monkeypatch.context() as patch:
        patch.setattr(kept_reply, "answer_once", noted)
        run_in_process(settings(tmp_path, tasks={"count": 1, "rounds": 1}))
    site, request = first[0]
    for path in (tmp_path / "runs").rglob("released/*.safetensors"):
        path.unlink()
    done = threading.Event()

    def ask() -> None:
        folder = site.state(request.run).folder
        kept_reply.answer_once(site, request, lambda: keep_split_key(folder, "ab") or done.set() or request)

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(20)


def test_a_full_disk_sends_the_reply_and_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StateError("no room")

    monkeypatch.setattr(kept_reply, "replace_file", full)
    summary: dict[str, Any] = run_in_process(settings(tmp_path))
    assert summary["rounds"] == 4 and not list((tmp_path / "runs").rglob("released/*"))


def test_the_run_counts_a_question_once_and_never_takes_off_what_may_have_left(tmp_path: Path) -> None:
    from perennial.config import charges
    from perennial.config.experiment import load_experiment

    experiment = load_experiment(Path(settings(tmp_path).experiment))
    entry = [charges.price_update(experiment, "ab").entry]

    def count(*steps: tuple[str, int, str]) -> int:
        record = Releases(tmp_path)
        record.path.unlink(missing_ok=True)
        for word, number, same in steps:
            getattr(record, word)(number, ["linz"], entry, same=same)
        return len(record.list_charged().get("linz", []))

    assert count(("asked", 1, "a"), ("asked", 1, "a")) == 1
    assert count(("asked", 1, "a"), ("asked", 1, "b")) == 2
    assert count(("asked", 1, ""), ("asked", 1, "")) == 2
    assert count(("asked", 1, "a"), ("asked", 2, "b"), ("asked", 1, "a")) == 3, (
        "the site kept the newest round's"
    )
    assert count(("asked", 1, "a"), ("refused", 1, "a")) == 0
    assert count(("asked", 1, "a"), ("refused", 1, "a"), ("asked", 1, "a")) == 1
    assert count(("asked", 1, "a"), ("asked", 1, "a"), ("refused", 1, "a")) == 1
    assert json.loads(Releases(tmp_path).path.read_text().splitlines()[0])["same"] == "a"
    again, changed = Releases(tmp_path), [replace(entry[0], experiment="another")]
    again.asked(1, ["linz"], changed, same="a")
    assert len(again.list_charged()["linz"]) == 2, "under a changed experiment a site answers anew"

"""Secure aggregation through the real apps: the same bits with masks and without, sites that fall out,
processes that are killed in any phase, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from perennial.client.app import app as client_app
from perennial.client.secure_state import SecureState
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, StateError
from perennial.privacy.secure.keys import Words
from perennial.privacy.secure.site_session import SiteSession
from perennial.protocol.fields import read_kind
from perennial.protocol.stamp import STAMP_FIELDS
from perennial.server.app import serve
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.secure.store import Opened, SumStore

SMALL: dict[str, Any] = {
    "name": "secure",
    "data": {"source": "digits", "sites": 4, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "secure": {"least": 3},
    "rounds": {"deadline": 30, "max_skipped": 50},
}
PHASES = ("ShareRequest", "TrainRequest", "VoteRequest", "OpenRequest")


class Killed(Exception):
    """The server dies here."""


def write(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    return run_in_process(RunSettings(write(folder, **changes), runs=str(folder / "runs")))


Fault = Callable[[Message, int, str], Message | None]
"""(request, node, kind) -> an error in place of the reply, or None; may raise Killed."""


class FaultyGrid(InProcessGrid):
    """Sites answer, or not, as fault says. after: faults happen when the site has answered already."""

    def __init__(self, contexts: dict[int, Context], fault: Fault, after: bool = False) -> None:
        self._fault, self._after = fault, after
        self.journal: list[tuple[str, int]] = []
        super().__init__(self._answer, contexts)

    def _answer(self, message: Message, context: Context) -> Message:
        kind = read_kind(message.content)
        node = context.node_id
        self.journal.append((kind, node))
        reply = client_app(message, context) if self._after else None
        found = self._fault(message, node, kind)
        if found is not None:
            return found
        return reply if reply is not None else client_app(message, context)


def gone(message: Message) -> Message:
    return Message(Error(ErrorCode.UNKNOWN, "the site is gone"), reply_to=message)


def serve_with(folder: Path, fault: Fault, after: bool = False, resume: bool = False, **changes: Any) -> Any:
    """A run of the small experiment over a faulty grid; (summary, grid)."""
    return serve_file(Path(write(folder, **changes)), fault, after, resume)


def serve_file(path: Path, fault: Fault, after: bool = False, resume: bool = False) -> Any:
    """A run of an experiment over a faulty grid, beside its file; (summary, grid)."""
    settings = RunSettings(str(path), runs=str(path.parent / "runs"), resume="yes" if resume else "")
    config = dict(vars(settings))
    sites = load_experiment(path).data.sites or 0
    grid = FaultyGrid(build_site_contexts(sites, config), fault, after)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    return serve(grid, context, engine="in-process", listener=None), grid


def events(folder: Path, name: str = "secure") -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "uniform_mean"},
        {
            "learner": {
                "preset": "none",
                "optimizer": {"lr": 0.05},
                "correction": {"name": "fedprox", "mu": 0.1},
            }
        },
        {
            "tasks": {"count": 1, "rounds": 3},
            "absence": [{"site": "site-3", "first_round": 1, "last_round": 1}],
        },
    ],
    ids=["fedavg", "uniform_mean", "fedprox", "late site"],
)
def test_model_has_the_same_bits_with_masks_and_without(tmp_path: Path, changes: dict[str, Any]) -> None:
    masked = run(tmp_path / "on", **changes)
    clear = run(tmp_path / "off", **changes, secure={"least": 3, "masks": False})
    assert masked["model_sha256"] == clear["model_sha256"]
    assert masked["accuracy_matrix"] == clear["accuracy_matrix"]
    assert masked["federated_accuracy"] == clear["federated_accuracy"]
    assert all(facts.get("accuracy") is None for facts in masked["sites"].values())


@pytest.mark.slow
@pytest.mark.parametrize("sites", [3, 10, 40, 100])
def test_federations_of_any_size_have_the_same_bits(tmp_path: Path, sites: int) -> None:
    data = {"source": "digits", "sites": sites, "partition": {"kind": "iid"}}
    # no deadline that a slow machine could miss: the sums must be of the same sites
    rounds = {"deadline": 3600, "quorum": sites}
    changes: dict[str, Any] = {"data": data, "evaluation": {"federated": False}, "rounds": rounds}
    colluders = sites // 4
    masked = run(tmp_path / "on", **changes, secure={"least": 3, "assumed_colluders": colluders})
    clear = run(
        tmp_path / "off", **changes, secure={"least": 3, "assumed_colluders": colluders, "masks": False}
    )
    assert masked["model_sha256"] == clear["model_sha256"]
    assert masked["rounds"] == clear["rounds"] == 2


def test_sites_that_fall_out_leave_the_sum_of_the_others(tmp_path: Path) -> None:
    """Site 4 never sends masked values: the model is that of a run in which it is absent."""

    def fault(message: Message, node: int, kind: str) -> Message | None:
        return gone(message) if node == 4 and kind == "TrainRequest" else None

    found, _ = serve_with(tmp_path / "a", fault)
    away = [{"site": "site-3", "first_round": 1}]
    expected = run(tmp_path / "b", absence=away)
    assert found["model_sha256"] == expected["model_sha256"]
    rounds = [event for event in events(tmp_path / "a") if event["event"] == "round"]
    assert all(event["participants"] == ["site-0", "site-1", "site-2"] for event in rounds)


@pytest.mark.parametrize("patterns", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_random_drop_outs_end_in_the_sum_of_those_named_or_name_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patterns: int
) -> None:
    """Each site falls silent in a random phase of each round. The sums are compared with those of the sites'
    own words, which the test keeps from before they were masked."""
    clear: dict[tuple[int, str], Words] = {}
    real = SiteSession.mask

    def mask(session: SiteSession, words: Words) -> None:
        clear[session.attempt.number, session.name] = words.copy()
        real(session, words)

    monkeypatch.setattr(SiteSession, "mask", mask)
    opened_sums: dict[int, Opened] = {}
    keep = SumStore.keep_opened

    def keep_opened(store: SumStore, subject: Any, opened: Opened) -> None:
        opened_sums[opened.attempt] = opened
        keep(store, subject, opened)

    monkeypatch.setattr(SumStore, "keep_opened", keep_opened)
    generator = np.random.Generator(np.random.PCG64(5))
    falls: dict[tuple[int, int], int] = {}

    def fault(message: Message, node: int, kind: str) -> Message | None:
        if kind not in PHASES:
            return None
        if kind == "OpenRequest":
            # asked for again in later rounds: a site that was silent once may be back
            return gone(message) if generator.random() < 0.15 else None
        # a round that was not opened is asked for again, and another site falls silent then
        tried = sum(event["event"] == "round" for event in events(tmp_path / "a"))
        phase = falls.setdefault((tried, node), int(generator.choice(5, p=[0.05, 0.1, 0.1, 0.0, 0.75])))
        return gone(message) if PHASES.index(kind) >= phase else None

    serve_with(tmp_path / "a", fault, tasks={"count": 1, "rounds": patterns})
    told = events(tmp_path / "a")
    rounds = [event for event in told if event["event"] == "round"]
    notes = " ".join(event["text"] for event in told if event["event"] == "note")
    opened = [event["round"] for event in rounds if not event["skipped"]]
    assert opened == list(range(1, patterns + 1)) and len(rounds) > patterns, "no round is used up"
    for event in rounds:
        if event["skipped"]:
            assert f"round {event['round']}: no sum was opened" in notes
            continue
        found = opened_sums[event["details"]["secure"]["attempt"]]
        assert event["participants"] == list(found.survivors)
        words = [clear[found.attempt, name] for name in found.survivors]
        assert np.array_equal(found.words, np.sum(words, axis=0, dtype=np.uint64))


@pytest.mark.parametrize("after", [False, True], ids=["before the site answers", "after it"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("node", [1, 4])
def test_server_that_is_killed_in_any_phase_goes_on_to_the_same_bits(
    tmp_path: Path, phase: str, node: int, after: bool
) -> None:
    whole = run(tmp_path / "whole")
    met = 0

    def fault(message: Message, at: int, kind: str) -> Message | None:
        nonlocal met
        if kind == phase and at == node:
            met += 1
            if met == 2:
                raise Killed
        return None

    with pytest.raises(Killed):
        serve_dying(Path(write(tmp_path / "a")), fault, after)
    resumed, _ = serve_with(tmp_path / "a", lambda *_: None, resume=True)
    assert resumed["model_sha256"] == whole["model_sha256"]


def serve_dying(path: Path, fault: Fault, after: bool) -> None:
    """As serve_file; Killed ends the server, as it would not if the app had raised it."""

    class Dying(FaultyGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.has_error() and "Killed" in str(reply.error.reason):
                    raise Killed
            return replies

    config = dict(vars(RunSettings(str(path), runs=str(path.parent / "runs"))))
    grid = Dying(build_site_contexts(4, config), fault, after)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    serve(grid, context, engine="in-process", listener=None)


def test_site_that_dies_between_its_two_writes_masks_no_second_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masked values are on its disk, and the note that they are is not. The server dies with it."""

    class Dead(BaseException):
        pass

    masked: list[tuple[str, int]] = []
    mask, keep = SiteSession.mask, SecureState.keep

    def counted(session: SiteSession, words: Words) -> None:
        masked.append((session.name, session.attempt.number))
        mask(session, words)

    def dying(state: SecureState, session: SiteSession) -> None:
        if session.stage == "masked" and masked == [("site-0", 1), ("site-1", 1)]:
            raise Dead
        keep(state, session)

    whole = run(tmp_path / "whole")
    monkeypatch.setattr(SiteSession, "mask", counted)
    monkeypatch.setattr(SecureState, "keep", dying)
    with pytest.raises(Dead):
        serve_with(tmp_path / "a", lambda *_: None)
    monkeypatch.setattr(SecureState, "keep", keep)
    resumed, _ = serve_with(tmp_path / "a", lambda *_: None, resume=True)
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert masked.count(("site-1", 1)) == 1


def test_opening_that_failed_is_asked_for_again_and_no_other_sum_is_made(tmp_path: Path) -> None:
    """Only one site gives shares out at first. The same round, asked again, opens that sum."""
    whole = run(tmp_path / "whole", tasks={"count": 1, "rounds": 2})

    def fault(message: Message, node: int, kind: str) -> Message | None:
        tried.setdefault((kind, node), 0)
        tried[kind, node] += 1
        return gone(message) if kind == "OpenRequest" and node > 1 and tried[kind, node] == 1 else None

    tried: dict[tuple[str, int], int] = {}
    found, _ = serve_with(tmp_path / "a", fault, tasks={"count": 1, "rounds": 2})
    rounds = [event for event in events(tmp_path / "a") if event["event"] == "round"]
    assert [event["skipped"] for event in rounds] == [True, False, False]
    assert [event["round"] for event in rounds] == [1, 1, 2]
    assert rounds[1]["details"]["secure"]["attempt"] == 1, "the sum that was not opened, and no other"
    assert found["rounds"] == whole["rounds"] == 2 and found["model_sha256"] == whole["model_sha256"]


def test_messages_of_a_masked_run_hold_no_value_of_one_site(tmp_path: Path) -> None:
    """What travels is words, keys, sealed shares and signatures; counts, losses and updates do not."""
    kinds: dict[str, set[str]] = {}

    class Listening(FaultyGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                fields = {*reply.content["fields"], *(n for n in reply.content if n != "fields")}
                kinds.setdefault(read_kind(reply.content), set()).update(fields)
            return replies

    config = dict(vars(RunSettings(write(tmp_path), runs=str(tmp_path / "runs"))))
    grid = Listening(build_site_contexts(4, config), lambda *_: None)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    serve(grid, context, engine="in-process", listener=None)
    replies = {"IntroduceReply", "ShareReply", "MaskedReply", "VoteReply", "OpenReply"}
    assert kinds.keys() == {"DescribeReply", *replies}
    assert kinds["MaskedReply"] - {"message", "attempt", *STAMP_FIELDS} == {"words", "model"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": "layer_attention"}, "attention over layers compares single updates"),
        ({"strategy": {"name": "contribution", "base": "fedavg"}}, "the value of a site"),
        ({"strategy": "serial_ring"}, "hands a single site's model on"),
        ({"secure": {"assumed_colluders": 3}}, "data.sites is 4, and a sum needs 5"),
        ({"secure": {"quorum": 6}}, "a sum needs 6"),
    ],
)
def test_what_needs_single_updates_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_experiment(Path(write(tmp_path, **changes)))


def test_run_of_too_few_sites_stops_with_the_reason(tmp_path: Path) -> None:
    absence = [{"site": f"site-{index}", "first_round": 1} for index in (1, 2)]
    with pytest.raises(StateError, match="times in a row"):
        run(tmp_path, absence=absence, rounds={"max_skipped": 2, "deadline": 30})
    notes = [event["text"] for event in events(tmp_path) if event["event"] == "note"]
    assert any("2 sites are ready for a sum that takes 3" in note for note in notes)


def test_site_of_a_masked_run_answers_no_request_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(self: FedAvg, services: Any) -> None:
        """A server that wants single updates."""

    monkeypatch.setattr(FedAvg, "attach", attach)
    with pytest.raises(StateError, match="exactly when the experiment has `secure`"):
        run(tmp_path, rounds={"max_skipped": 1})

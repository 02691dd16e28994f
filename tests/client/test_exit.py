"""The one exit of a site: what has no type or no charge does not leave, whoever forgot it.

Each test plays a handler that somebody wrote in haste, or against the rules.
"""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client import handlers, training_turn
from perennial.client.release import AFTER_DATA, Paid, leave, pay, serialise
from perennial.config import charges
from perennial.foundation.errors import DataError, PolicyRefusal, PrivacyError
from perennial.privacy.ledger import Ledger
from perennial.privacy.released import Public, Released
from perennial.protocol import messages, secure_messages
from perennial.protocol.fields import WireMessage, record_bytes
from perennial.protocol.messages import EvaluateReply, TrainReply, TrainRequest
from perennial.protocol.stamp import STAMP_FIELDS, Stamp
from perennial.protocol.tensors import Tensors
from tests.redteam.attacked_hospital import Hospital

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 4.0, "sample_rate": 0.2}
QUIET = {"evaluation": {"federated": False}}
REPLIES = [
    kind
    for module in (messages, secure_messages)
    for name, kind in vars(module).items()
    if name.endswith("Reply")
]
FIELDS = [
    (kind, field.name)
    for kind in REPLIES
    for field in dataclasses.fields(kind)
    if field.name not in STAMP_FIELDS or not issubclass(kind, Stamp)
]


def private(folder: Path, **policy: Any) -> Hospital:
    return Hospital(folder, {"answers": ["train", "evaluate"], **policy}, privacy=SAMPLE, **QUIET)


def request(hospital: Hospital) -> TrainRequest:
    return TrainRequest(**hospital.stamp(), arrays=Tensors(hospital.arrays()))


def update_of(hospital: Hospital) -> Released[Tensors]:
    mechanism = charges.price_update(hospital.experiment, hospital.stamp()["run"])
    return Released(Tensors(w=torch.zeros(2)), mechanism)


def paid(hospital: Hospital) -> int:
    ledger = Ledger(hospital.config.state_dir)
    return len(ledger.read_entries()) if ledger.started else 0


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_no_field_of_any_reply_leaves_without_a_type(kind: Any, name: str, tmp_path: Path) -> None:
    hospital = private(tmp_path)
    for value in (7, "text", [1, 2], {"a": 1}, Tensors(w=torch.ones(1))):
        given: dict[str, Any] = {name: value}
        with pytest.raises(PrivacyError, match=rf"{kind.__name__}\.{name}: found a"):
            leave(hospital.site.identity, request(hospital), kind, **given)
    assert paid(hospital) == 0


def test_a_field_that_the_message_lacks_does_not_leave(tmp_path: Path) -> None:
    hospital = private(tmp_path)
    with pytest.raises(PrivacyError, match=r"TrainReply\.histogram"):
        leave(hospital.site.identity, request(hospital), TrainReply, histogram=Public(3))


@pytest.mark.parametrize("name", ["train_loss", "metrics"])
def test_a_field_that_speaks_of_data_is_not_called_public(name: str, tmp_path: Path) -> None:
    hospital = private(tmp_path)
    given: dict[str, Any] = {name: Public('{"mean": 0.25}')}
    with pytest.raises(PrivacyError, match=rf"TrainReply\.{name}: found a public value"):
        leave(hospital.site.identity, request(hospital), TrainReply, **given)


@pytest.mark.parametrize(("name", "value"), [("num_examples", 117), ("steps", 3), ("lends_digests", False)])
def test_a_count_of_the_data_is_not_called_public(name: str, value: int, tmp_path: Path) -> None:
    hospital = private(tmp_path)
    typed: dict[str, Any] = {"update": update_of(hospital), "num_examples": Public(1)}
    typed["steps"] = Public(charges.price_update(hospital.experiment, "r").entry.steps)
    leave(hospital.site.identity, request(hospital), TrainReply, **typed)
    with pytest.raises(PrivacyError, match=rf"TrainReply\.{name}: found a number that is not"):
        leave(hospital.site.identity, request(hospital), TrainReply, **typed | {name: Public(value)})
    assert paid(hospital) == 1


def test_a_new_field_needs_a_type_too(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(TrainReply):
        histogram: list[int]

    hospital = private(tmp_path)
    typed: dict[str, Any] = {"update": update_of(hospital), "num_examples": Public(1)}
    with pytest.raises(PrivacyError, match=r"Wider\.histogram: found a list"):
        leave(hospital.site.identity, request(hospital), Wider, **typed, histogram=[4, 2])  # pyright: ignore[reportArgumentType]
    assert paid(hospital) == 0


@pytest.mark.parametrize("value", [{"counts": [1, 2]}, [[1, 2]], torch.ones(2), [torch.ones(1)], Tensors()])
def test_neither_mapping_nor_tensor_is_public(value: Any) -> None:
    with pytest.raises(PrivacyError, match="a public value is a"):
        Public(value)


def test_a_value_is_released_by_a_mechanism_and_paid_by_the_exit_alone(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="no mechanism"):
        Released([1, 2])
    with pytest.raises(PrivacyError, match="only once the exit has charged"):
        Paid([1, 2])
    with pytest.raises(PrivacyError, match="no mechanism"):
        # beside noised counts, which are paid for, tables in the clear have nothing to be charged to
        Released([1], *pay(private(tmp_path).site.identity, update_of(private(tmp_path))).mechanisms)


@pytest.mark.parametrize("field", ["train_loss", "num_examples", "steps", "metrics"])
def test_a_private_run_sends_nothing_in_the_clear(field: str, tmp_path: Path) -> None:
    hospital = private(tmp_path)
    clear = charges.price_clear_release(hospital.experiment, "0" * 16, "metrics")
    typed: dict[str, Any] = {"update": update_of(hospital), "num_examples": Public(1)}
    typed[field] = Released("{}" if field == "metrics" else 7, clear)
    with pytest.raises(PrivacyError, match="metrics would leave without noise"):
        leave(hospital.site.identity, request(hospital), TrainReply, **typed)
    assert paid(hospital) == 0, "the update is not charged for, because it did not leave either"


def test_a_site_that_demands_a_protection_sends_nothing_in_the_clear_either(tmp_path: Path) -> None:
    policy = {"answers": ["train"], "require_privacy": "sample", "max_epsilon": 1e9}
    hospital = Hospital(tmp_path, policy)
    with pytest.raises(PrivacyError, match=r"require_privacy sample: update would leave"):
        pay(hospital.site.identity, update_of(hospital))


def test_fields_of_one_release_are_charged_once_and_others_by_themselves(tmp_path: Path) -> None:
    hospital = private(tmp_path)
    first, second = update_of(hospital), update_of(hospital)
    identity, asked = hospital.site.identity, request(hospital)
    leave(identity, asked, EvaluateReply, correct=first.alike([1]), total=first.alike([2]))
    assert paid(hospital) == 1
    leave(identity, asked, EvaluateReply, correct=first.alike([1]), total=second.alike([2]))
    assert paid(hospital) == 3


def test_what_the_budget_does_not_cover_does_not_leave(tmp_path: Path) -> None:
    hospital = private(tmp_path, require_privacy="sample", max_epsilon=0.01)
    with pytest.raises(PrivacyError, match="lifetime epsilon"):
        leave(hospital.site.identity, request(hospital), TrainReply, update=update_of(hospital))
    assert paid(hospital) == 0


def test_less_noise_than_is_charged_for_does_not_leave(tmp_path: Path) -> None:
    mechanism = charges.price_update(private(tmp_path).experiment, "r")
    mechanism.require(4.0)
    with pytest.raises(PrivacyError, match="noise of standard deviation 3"):
        mechanism.require(3.0)


def test_dp_sgd_that_took_more_steps_than_are_charged_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital, train = private(tmp_path), training_turn.TrainingTurn._train
    monkeypatch.setattr(
        training_turn.TrainingTurn, "_train", lambda turn: dataclasses.replace(train(turn), steps=99)
    )
    assert hospital.ask(request(hospital)) is None
    assert hospital.refusal == f"error: {AFTER_DATA}" and paid(hospital) == 1


def test_a_reply_that_a_handler_built_itself_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(site: Any, asked: TrainRequest) -> TrainReply:
        samples = len(site.data.train)
        return TrainReply(**asked.stamp_fields, update=asked.arrays, num_examples=samples)

    monkeypatch.setattr(handlers, "answer_train", careless)
    hospital = private(tmp_path)
    assert hospital.ask(request(hospital)) is None
    assert hospital.refusal.startswith("privacy: TrainReply: not built by the exit")


@pytest.mark.parametrize("way", ["replaced", "changed in place"])
def test_a_reply_that_was_changed_behind_the_exit_does_not_leave(way: str, tmp_path: Path) -> None:
    hospital = private(tmp_path)
    typed: dict[str, Any] = {"update": update_of(hospital), "num_examples": Public(1)}
    reply = leave(hospital.site.identity, request(hospital), TrainReply, **typed)
    serialise(reply)
    if way == "replaced":
        reply = dataclasses.replace(reply, metrics='{"mean": 0.25}')
    else:
        object.__setattr__(reply, "metrics", '{"mean": 0.25}')
    with pytest.raises(PrivacyError, match="changed since"):
        serialise(reply)


def test_an_edit_in_place_changes_nothing_that_leaves(tmp_path: Path) -> None:
    hospital = private(tmp_path)
    update = update_of(hospital)
    typed: dict[str, Any] = {"update": update, "num_examples": Public(1)}
    reply = leave(hospital.site.identity, request(hospital), TrainReply, **typed)
    before = {name: each.clone() for name, each in TrainReply.from_record(serialise(reply)).update.items()}
    for tensors in (update.value, reply.update):
        for tensor in tensors.values():
            tensor.fill_(0.25)
    after = TrainReply.from_record(serialise(reply))
    assert all(torch.equal(after.update[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("error", [ValueError, DataError, KeyError, ZeroDivisionError])
def test_the_text_of_an_unforeseen_error_stays_at_the_site(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise error("Mrs Smith, 42 images, /data/smith.png")

    monkeypatch.setattr(training_turn, "find_training_indices", failing)
    hospital = private(tmp_path)
    assert hospital.ask(request(hospital)) is None
    assert hospital.refusal == f"error: {AFTER_DATA}" and paid(hospital) == 1


def test_a_refusal_tells_nothing_that_was_computed_from_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talkative(site: Any, *_: Any) -> None:
        raise PolicyRefusal(f"the mean is {float(site.data.x.float().mean())}")

    monkeypatch.setattr(training_turn, "protect", talkative)
    hospital = private(tmp_path)
    assert hospital.ask(request(hospital)) is None
    assert hospital.refusal == f"error: {AFTER_DATA}" and paid(hospital) == 1
    budget = private(tmp_path / "budget", require_privacy="sample", max_epsilon=0.01)
    monkeypatch.undo()
    assert budget.ask(request(budget)) is None
    assert "lifetime epsilon" in budget.refusal, "what follows from the ledger alone is said"


def test_a_method_of_the_site_cannot_change_what_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def close(_: Any, update: torch.Tensor, steps: int) -> None:
        seen.append(update.clone())
        update.fill_(7.0)

    monkeypatch.setattr("perennial.learning.site_method.SiteMethods.close", close)
    hospital = private(tmp_path)
    reply = hospital.ask(request(hospital))
    assert isinstance(reply, TrainReply) and seen
    left = sum(float(tensor.double().sum()) for tensor in reply.update.values())
    assert left == pytest.approx(float(seen[0].double().sum()), rel=1e-3)


def test_a_reply_is_as_long_whatever_the_data(tmp_path: Path) -> None:
    lengths = set()
    for samples in (300, 240):
        data = {"source": "digits", "sites": 3, "samples_limit": samples, "partition": {"kind": "iid"}}
        policy = {"answers": ["train"]}
        hospital = Hospital(tmp_path / str(samples), policy, data=data, privacy=SAMPLE, **QUIET)
        reply = hospital.ask(request(hospital))
        assert isinstance(reply, TrainReply)
        assert (reply.num_examples, reply.train_loss, reply.metrics) == (1, None, "{}")
        lengths.add((record_bytes(reply.to_record()), reply.steps))
    assert len(lengths) == 1


def test_replies_are_built_and_serialised_in_one_file() -> None:
    """restore_paid() and let_out() are for what lies on the site's own disk, and for these modules alone."""
    kinds = {kind.__name__ for kind in REPLIES}
    assert len(kinds) == 15 and all(issubclass(kind, WireMessage) for kind in REPLIES)
    package, found = ROOT / "perennial", dict[str, set[str]]()
    strategies = package / "strategies"
    halves = [*strategies.glob("*/site.py"), *strategies.glob("*/personal_head.py")]
    for path in [*(package / "client").glob("*.py"), *halves]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                found.setdefault(name, set()).add(path.relative_to(package).as_posix())
    assert found["to_record"] == {"client/release.py"}
    assert found["restore_paid"] <= {
        "client/secure_values.py",
        "strategies/analytic/site.py",
        "strategies/digest_synthesis/site.py",
    }
    assert found["let_out"] == {"client/release.py", "client/kept_reply.py"}
    assert not kinds & found.keys(), "a reply is built by leave() alone"
    assert found["charge"] == {"client/release.py"}

"""What a hostile server gets from a site's requests of masked sums that carry no values."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from perennial.client import time_limit as time_limit_module
from perennial.client.request_count import REPEATS
from perennial.client.secure_state import SecureState
from perennial.config.charges import price_update
from perennial.config.site import SitePolicy
from perennial.foundation.errors import PerennialError, PolicyRefusal, StateError
from perennial.privacy.released import Public, Released
from perennial.privacy.secure.keys import Words
from perennial.privacy.secure.roster import Attempt, Parameters, Peer
from perennial.privacy.secure.site_session import SiteSession
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainRequest
from perennial.protocol.secure_messages import (
    SEALED,
    IntroduceRequest,
    OpenRequest,
    ShareRequest,
    VoteRequest,
)
from perennial.protocol.tensors import Tensors
from tests.privacy.secure_sites import RUN, MaskedFederation, subject_of
from tests.redteam.attacked_hospital import Hospital

SECURE = {"secure": {"least": 3, "assumed_colluders": 0}}
KEYS = {"peers": ["a"], "peer_identities": ["0" * 64], "peer_ciphers": ["0" * 64]}
REQUESTS: dict[str, tuple[type[WireMessage], dict[str, Any]]] = {
    "introduce": (IntroduceRequest, {}),
    "share": (ShareRequest, {"attempt": 1, **KEYS, "peer_signatures": ["0" * 128]}),
    "vote": (VoteRequest, {"attempt": 1, "survivors": ["a"], "senders": ["a"], "shares": ["0" * SEALED]}),
    "open": (OpenRequest, {"attempt": 1, "survivors": ["a"], "voters": ["a"], "votes": ["0" * 128]}),
}


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital(tmp_path, {"answers": ["train"]}, **SECURE)


def ask(hospital: Hospital, kind: str, **changes: Any) -> str:
    """The reason of the refusal; '' for an answer."""
    cls, fields = REQUESTS[kind]
    hospital.refusal = ""
    try:
        hospital.ask(cls(**(hospital.stamp() | fields | changes)))
    except ValueError:
        return ""  # an answer, of a kind that Hospital does not read
    return hospital.refusal


def runs_of(hospital: Hospital) -> list[str]:
    return sorted(path.name for path in (hospital.config.state_dir / "runs").glob("*"))


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_round_or_task_that_the_experiment_has_not_is_refused(hospital: Hospital, kind: str) -> None:
    for change in ({"round": 77}, {"task": 9}, {"round": 0}):
        assert "policy: round" in (said := ask(hospital, kind, **change)) or "protocol: " in said
    assert runs_of(hospital) == []


@pytest.mark.parametrize("kind", REQUESTS)
def test_invented_runs_come_to_an_end_and_leave_no_folders(hospital: Hospital, kind: str) -> None:
    said = [ask(hospital, kind, run=f"{number:016x}") for number in range(1, 31)]
    assert len(runs_of(hospital)) <= hospital.config.policy.max_runs
    assert "policy.max_runs" in said[-1] or "has begun no run" in said[-1]


def test_introductions_of_one_round_come_to_an_end(hospital: Hospital) -> None:
    said = [ask(hospital, "introduce") for _ in range(1 + REPEATS + 1)]
    assert said[0] == "" and "repeated request: introduce of round 1" in said[-1]


def test_another_experiment_has_no_sums_here(hospital: Hospital) -> None:
    assert "experiment: found" in ask(hospital, "introduce", experiment="0" * 64)


def test_a_long_share_is_refused_before_it_is_looked_at(hospital: Hospital) -> None:
    vote = VoteRequest(**hospital.stamp(), **REQUESTS["vote"][1])
    record = vote.to_record()
    record["fields"]["shares"] = ["0" * (SEALED + 2)]  # pyright: ignore
    from flwr.app import Context, RecordDict

    from perennial.client.app import app
    from perennial.protocol.messages import Refusal

    context = Context(
        1, 1, {"site": str(hospital.site_file)}, RecordDict(), {"digest": hospital.experiment.digest}
    )
    reply = app(Message(record, 1, vote.message_type), context)
    assert f"{SEALED} hexadecimal digits" in Refusal.from_record(reply.content).reason


def test_a_request_of_texts_alone_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit_module, "LARGEST", 5_000)
    small = Hospital(tmp_path, {"answers": ["train"]}, **SECURE)
    many = {"senders": ["a"] * 50, "shares": ["0" * SEALED] * 50}
    assert "largest request: VoteRequest: found" in ask(small, "vote", **many)


# one lock, and stages that never go back


def _enrolled(folder: Path, run: str = RUN) -> tuple[SecureState, SiteSession]:
    """A site in a sum of three, about to mask its values."""
    federation = MaskedFederation(3, Parameters())
    for name in federation.names:
        keys = federation.identity[name], federation.cipher[name]
        federation.peers[federation.names.index(name)] = Peer.introduce(name, *keys, run, 1)
    sessions = federation.prepared(Attempt(run, 1, 1))
    keeper = SecureState(folder, run, "site-000", SitePolicy())
    session = sessions["site-000"]
    keeper.keep(session)
    session.enrol(subject_of(), [each.member for each in sessions.values()])
    return keeper, session


def test_an_attempt_on_the_disk_never_goes_back(tmp_path: Path) -> None:
    keeper, session = _enrolled(tmp_path)
    before = SiteSession.from_json(session.to_json())
    session.mask(np.zeros(4, np.uint64))
    keeper.keep(session)
    with pytest.raises(StateError, match="is masked; it does not become prepared again"):
        keeper.keep(before)
    found = keeper.load_session(1)
    assert found is not None and found.stage == "masked"


def test_two_requests_of_one_attempt_at_once_mask_one_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would find the attempt prepared; the server would have two values under the same masks."""
    from perennial.client import secure_answers, secure_values

    keeper, session = _enrolled(tmp_path)
    keeper.keep(session)
    hospital = Hospital(tmp_path / "h", {"answers": ["train"]}, **SECURE)
    site = hospital.site
    monkeypatch.setattr(
        secure_answers,
        "open_secure_state",
        lambda *_: (site.experiment.secure, SecureState(tmp_path, RUN, "site-000", SitePolicy())),
    )
    request = _train(hospital, session)
    together, sent = threading.Barrier(2, timeout=1), []

    def words() -> Released[Words]:
        number = len(sent)
        sent.append(number)
        with suppress(threading.BrokenBarrierError):
            together.wait()  # both are here, unless the second has to wait for the first
        return Released(np.full(4, number, np.uint64), price_update(site.experiment, request.run))

    answers: list[bytes] = []

    def answer() -> None:
        try:
            reply = secure_values.build_masked_reply(site, request, "update", "b" * 64, words)
        except PerennialError:
            return
        answers.append(reply.words["words"].numpy().tobytes())

    threads = [threading.Thread(target=answer) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == 1, "the values were made once"
    assert len(answers) == 2 and len(set(answers)) == 1


def _train(hospital: Hospital, session: Any) -> TrainRequest:
    members = session.members
    return TrainRequest(
        **hospital.stamp(),
        arrays=Tensors(hospital.arrays()),
        attempt=1,
        roster=[member.name for member in members],
        roster_masks=[member.mask for member in members],
        roster_commitments=[member.commitment for member in members],
        roster_signatures=[member.signature for member in members],
    )


def test_a_value_that_one_run_masked_is_masked_in_no_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums of one value, each opened by other sites, would differ by the sites that are in one alone."""
    from perennial.client import secure_answers, secure_values

    hospital = Hospital(tmp_path / "h", {"answers": ["train"]}, **SECURE)
    site, made = hospital.site, []

    def words() -> Released[Words]:
        made.append(1)
        return Released(np.zeros(4, np.uint64), price_update(site.experiment, RUN))

    def masked(run: str) -> Any:
        keeper, session = _enrolled(tmp_path, run)
        monkeypatch.setattr(secure_answers, "open_secure_state", lambda *_: (site.experiment.secure, keeper))
        request = _train(hospital, session)
        keeper.keep(session)
        return secure_values.build_masked_reply(site, request, "update", "b" * 64, words)

    assert masked(RUN).words
    with pytest.raises(PolicyRefusal, match=f"secure: .* is masked in run {RUN}, whose sum may be opened"):
        masked("b" * 16)
    assert len(made) == 1, "refused before anything was computed or charged"


def test_an_update_that_is_not_finite_is_masked_as_zero(tmp_path: Path) -> None:
    """A refusal would tell, without a charge, whether a record makes the server's model overflow."""
    from perennial.client.secure_values import update_words
    from perennial.config import charges

    hospital = Hospital(tmp_path, {"answers": ["train"]}, **SECURE)
    request = TrainRequest(
        **hospital.stamp(),
        arrays=Tensors(hospital.arrays()),
        attempt=1,
        roster=["site-1", "site-2", "site-3"],
    )
    update = Tensors(w=torch.full((3,), torch.nan))
    typed = {
        "update": Released(update, charges.price_update(hospital.experiment, RUN)),
        "num_examples": Public(5),
    }
    assert update_words(hospital.site, request, typed).value[:3].tolist() == [0, 0, 0]

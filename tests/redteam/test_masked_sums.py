"""What a dishonest site can do under masks, where nobody sees its update, and what the sum still shows."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from perennial.client import handlers, secure_values
from perennial.client.release import Typed
from perennial.client.site import Site
from perennial.foundation.errors import PolicyRefusal, StateError
from perennial.privacy.released import Released
from perennial.privacy.secure.keys import Words, sign
from perennial.privacy.secure.roster import (
    Attempt,
    Member,
    Parameters,
    Peer,
    Subject,
    _encode_introduction,
)
from perennial.privacy.secure.site_session import Opening, SiteSession
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.server.roster import Attendance
from perennial.strategies.analytic import site as analytic_site
from perennial.strategies.secure.store import SumStore
from tests.privacy.secure_sites import MaskedFederation, attempt_of, subject_of
from tests.strategies.test_analytic_runs import own_cache  # noqa: F401
from tests.strategies.test_analytic_runs import run as run_analytic
from tests.strategies.test_secure_runs import events, gone, run, serve_with

Change = Any
"""(words of the dishonest site, before they are masked) -> None, in place."""


def with_liar(monkeypatch: pytest.MonkeyPatch, change: Change, times: int = 1 << 30) -> None:
    honest = handlers.update_words
    left = times

    def update_words(site: Site, request: TrainRequest, typed: Mapping[str, Typed]) -> Released[Words]:
        nonlocal left
        words = honest(site, request, typed)
        if site.name == "site-0" and left:
            left -= 1
            change(words.value)
        return words

    monkeypatch.setattr(handlers, "update_words", update_words)


def enlarge(words: Words) -> None:
    words[:-1] += np.uint64(1 << 52)


def count_more(words: Words) -> None:
    words[-1] = np.uint64(1 << 40)


def times_fifty(words: Words) -> None:
    words[:-1] *= np.uint64(50)


@pytest.mark.parametrize(
    ("change", "reason"), [(enlarge, "the mean update has norm"), (count_more, "the sum of the weights is")]
)
def test_a_sum_that_honest_sites_cannot_have_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, reason: str
) -> None:
    with_liar(monkeypatch, change)
    with pytest.raises(StateError, match="times in a row"):
        run(tmp_path, rounds={"max_skipped": 1, "deadline": 30})
    assert any(reason in event["text"] for event in events(tmp_path) if event["event"] == "note")


def told_rounds(folder: Path, name: str = "secure") -> list[tuple[int, bool]]:
    told = events(folder, name)
    return [(event["round"], event["skipped"]) for event in told if event["event"] == "round"]


def told_notes(folder: Path, name: str = "secure") -> str:
    return " ".join(event["text"] for event in events(folder, name) if event["event"] == "note")


@pytest.mark.parametrize("change", [enlarge, count_more])
def test_a_sum_that_is_not_used_is_made_anew_by_the_same_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    honest = run(tmp_path / "honest")
    with_liar(monkeypatch, change, times=1)
    found = run(tmp_path / "spoilt")
    assert told_rounds(tmp_path / "spoilt") == [(1, True), (1, False), (2, False)]
    assert "round 1: the opened sum is not used" in told_notes(tmp_path / "spoilt")
    assert found["model_sha256"] == honest["model_sha256"]
    assert not list((tmp_path / "spoilt").rglob("opened-00000001.*"))


@pytest.mark.parametrize("before", [True, False], ids=["before it is noted", "after it is noted"])
def test_server_that_is_killed_where_a_sum_is_not_used_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    class Dead(BaseException):
        pass

    keep = SumStore.keep_refused

    def dying(store: SumStore, *about: Any) -> None:
        if not before:
            keep(store, *about)
        raise Dead

    honest = run(tmp_path / "honest")
    with_liar(monkeypatch, enlarge, times=1)
    monkeypatch.setattr(SumStore, "keep_refused", dying)
    with pytest.raises(Dead):
        serve_with(tmp_path / "a", lambda *_: None)
    monkeypatch.setattr(SumStore, "keep_refused", keep)
    found, _ = serve_with(tmp_path / "a", lambda *_: None, resume=True)
    assert found["model_sha256"] == honest["model_sha256"]


def test_after_a_sum_that_is_not_used_no_sum_of_other_sites_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site 4 is silent in the next two tries; the other three would do for a sum."""
    honest, whole = serve_with(tmp_path / "honest", lambda *_: None)
    with_liar(monkeypatch, enlarge, times=1)
    tried = 0

    def fault(message: Message, node: int, kind: str) -> Message | None:
        nonlocal tried
        tried += node == 4 and kind == "TrainRequest"
        return gone(message) if node == 4 and kind == "TrainRequest" and tried in (2, 3) else None

    found, grid = serve_with(tmp_path / "a", fault)
    assert told_rounds(tmp_path / "a") == [(1, True)] * 3 + [(1, False), (2, False)]
    assert "3 of 4 masked values came, 4 are needed" in told_notes(tmp_path / "a")
    votes, of_whole = ([kind for kind, _ in each.journal].count("VoteRequest") for each in (grid, whole))
    assert votes == of_whole + 4, "those of the sum that is not used"
    assert found["model_sha256"] == honest["model_sha256"]


def test_site_that_is_away_after_a_sum_that_is_not_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_liar(monkeypatch, enlarge, times=1)
    seen = Attendance.gather_available

    def gather_available(attendance: Attendance, number: int) -> dict[str, int]:
        here = seen(attendance, number)
        if len(told_rounds(tmp_path)) == 1:
            del here["site-3"]
        return here

    monkeypatch.setattr(Attendance, "gather_available", gather_available)
    run(tmp_path)
    assert told_rounds(tmp_path) == [(1, True), (1, True), (1, False), (2, False)]
    dropped = [event["dropped"] for event in events(tmp_path) if event["event"] == "round"][1]
    assert [drop["site"] for drop in dropped] == ["site-0", "site-1", "site-2"]
    assert all("only together with site-3" in drop["reason"] for drop in dropped)


def test_words_of_another_length_leave_out_no_other_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dishonest site answers first."""
    pad = secure_values.restore_paid

    def shorten(tensors: Tensors) -> Any:
        return pad(Tensors(words=tensors["words"][:-1]) if next(wrong, False) else tensors)

    wrong = iter([True])
    away = [{"site": "site-0", "first_round": 1, "last_round": 1}]
    expected = run(tmp_path / "expected", absence=away)
    monkeypatch.setattr(secure_values, "restore_paid", shorten)
    found = run(tmp_path / "a")
    assert found["model_sha256"] == expected["model_sha256"]
    dropped = [event["dropped"] for event in events(tmp_path / "a") if event["event"] == "round"]
    assert [drop["site"] for drops in dropped for drop in drops] == ["site-0"]


def test_false_shares_of_an_opening_are_left_out_and_their_giver_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, give = run(tmp_path / "honest"), SiteSession.open

    def lie(session: SiteSession, *about: Any) -> Opening:
        given = give(session, *about)
        return (
            replace(given, seeds=dict.fromkeys(given.seeds, "00" * 33)) if session.name == "site-0" else given
        )

    monkeypatch.setattr(SiteSession, "open", lie)
    found = run(tmp_path / "a")
    assert told_rounds(tmp_path / "a") == [(1, False), (2, False)]
    assert found["model_sha256"] == honest["model_sha256"]
    dropped = [event["dropped"] for event in events(tmp_path / "a") if event["event"] == "round"]
    assert {drop["site"] for drops in dropped for drop in drops} == {"site-0"}
    assert "gave a false share of the seed of site 'site-1'" in str(dropped)


def test_sum_of_fewer_sites_than_the_quorum_is_not_opened(tmp_path: Path) -> None:
    """Three sites would do for a sum, but the round takes four: opened, it could be of no use to anybody."""
    tried = iter([True])
    rounds = {"deadline": 30, "quorum": 4, "max_skipped": 3}

    def fault(message: Message, node: int, kind: str) -> Message | None:
        return gone(message) if node == 4 and kind == "TrainRequest" and next(tried, False) else None

    honest = run(tmp_path / "honest", rounds=rounds)
    found, _ = serve_with(tmp_path / "a", fault, rounds=rounds)
    assert told_rounds(tmp_path / "a") == [(1, True), (1, False), (2, False)]
    assert found["model_sha256"] == honest["model_sha256"]


@pytest.mark.parametrize("sealed", [True, False], ids=["false shares", "damaged shares"])
def test_site_that_deals_out_false_shares_and_leaves_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """Site 4 takes part in no sum, but nobody can take its pair masks off the sum of round 1."""
    prepare = SiteSession.prepare

    def lie(name: str, attempt: Attempt, *more: Any) -> SiteSession:
        session = prepare(name, attempt, *more)
        if name == "site-3" and attempt.number == 1:
            other = prepare(name, attempt, *more)
            damaged = {to: "00" * (len(share) // 2) for to, share in session.sealed.items()}
            session.sealed = other.sealed if sealed else damaged
        return session

    def fault(message: Message, node: int, kind: str) -> Message | None:
        return gone(message) if node == 4 and kind == "TrainRequest" else None

    expected, _ = serve_with(tmp_path / "expected", fault)
    monkeypatch.setattr(SiteSession, "prepare", lie)
    found, _ = serve_with(tmp_path / "a", fault)
    assert told_rounds(tmp_path / "a") == [(1, True), (1, False), (2, False)]
    assert "the mask key of site 'site-3' does not come of the" in told_notes(tmp_path / "a")
    assert found["model_sha256"] == expected["model_sha256"]


LOW_ORDER = "00" * 32


@pytest.mark.parametrize("key", ["false signature", "low order"])
def test_a_site_whose_introduction_is_false_keeps_no_other_from_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    introduce = Peer.introduce

    def lie(name: str, identity: bytes, cipher: bytes, run: str, task: int) -> Peer:
        honest = introduce(name, identity, cipher, run, task)
        if name != "site-0":
            return honest
        if key == "false signature":
            return replace(honest, signature="00" * 64)
        signature = sign(identity, _encode_introduction(name, LOW_ORDER, run, task))
        return replace(honest, cipher=LOW_ORDER, signature=signature)

    monkeypatch.setattr(Peer, "introduce", lie)
    run(tmp_path)
    assert told_rounds(tmp_path) == [(1, False), (2, False)]
    assert {drop["site"] for event in events(tmp_path) for drop in event.get("dropped", ())} == {"site-0"}


@pytest.mark.parametrize("key", ["false signature", "low order"])
def test_a_site_whose_mask_key_is_false_keeps_no_other_from_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    honest = Member.sign

    def lie(attempt: Attempt, peers: bytes, name: str, mask: str, seed: bytes, identity: bytes) -> Member:
        if name != "site-0":
            return honest(attempt, peers, name, mask, seed, identity)
        if key == "low order":
            return honest(attempt, peers, name, LOW_ORDER, seed, identity)
        return replace(honest(attempt, peers, name, mask, seed, identity), signature="00" * 64)

    monkeypatch.setattr(Member, "sign", lie)
    run(tmp_path)
    assert told_rounds(tmp_path) == [(1, False), (2, False)]
    assert {drop["site"] for event in events(tmp_path) for drop in event.get("dropped", ())} == {"site-0"}


def test_sums_of_features_that_are_not_used_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, left = analytic_site._encode_words, [True]

    def spoil(typed: Any) -> Released[Words]:
        words = encode(typed)
        if left:
            words.value[0] += np.uint64(left.pop() << 52)
        return words

    monkeypatch.setattr(analytic_site, "_encode_words", spoil)
    changes: dict[str, Any] = {"data": {"samples_limit": 200}, "tasks": {"count": 2, "rounds": 1}}
    clear = run_analytic(tmp_path, "clear", **changes)
    on = run_analytic(tmp_path, "on", secure={"least": 3}, **changes)
    assert told_rounds(tmp_path, "on") == [(1, True), (1, False), (2, False)]
    assert on["model_sha256"] == clear["model_sha256"]


def test_an_update_within_the_bound_of_the_sum_spoils_the_model_and_nobody_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the threat model says is left: in the clear the gate would scale it down and name the site."""
    honest = run(tmp_path / "honest")
    with_liar(monkeypatch, times_fifty)
    spoilt = run(tmp_path / "spoilt")
    assert spoilt["model_sha256"] != honest["model_sha256"]
    told = [event for event in events(tmp_path / "spoilt") if event["event"] == "round"]
    assert all(not event["dropped"] and not event["refused"] for event in told)


def test_sites_that_were_asked_about_different_models_open_nothing():
    """A server that shows one site another model than the rest, to see its update alone."""
    federation = MaskedFederation(5, Parameters(1))
    attempt, other = attempt_of(), Subject(1, "update", "another model")
    sessions = federation.prepared(attempt)
    members = [session.member for session in sessions.values()]
    victim = federation.names[0]
    for name, session in sessions.items():
        session.enrol(subject_of() if name == victim else other, members)
        session.mask(np.zeros(3, np.uint64))
    adverts = {name: session.advert for name, session in sessions.items()}
    votes = {
        name: session.sign(
            federation.names,
            {sender: advert.shares[name] for sender, advert in adverts.items() if name in advert.shares},
            federation.cipher[name],
            federation.identity[name],
        )
        for name, session in sessions.items()
    }
    with pytest.raises(PolicyRefusal, match="1 valid signatures"):
        sessions[victim].open(federation.names, votes)
    with pytest.raises(PolicyRefusal, match="asked with another roster or for another sum"):
        sessions[victim].enrol(other, members)


def test_run_beside_another_opens_nothing_that_the_other_one_opened(tmp_path: Path) -> None:
    """Both runs have masked the updates of the first model when one of them opens its sum. Were the other one
    to open a sum without one of the sites, the difference would be that site's update."""
    once = {"count": 1, "rounds": 1}
    run(tmp_path / "a", tasks=once)
    opened = {path.parts[-3]: path for path in (tmp_path / "a").rglob("secure/opened.json")}
    assert sorted(opened) == ["site-0", "site-1", "site-2", "site-3"]

    def fault(message: Message, node: int, kind: str) -> Message | None:
        if kind == "OpenRequest":
            for secure in (tmp_path / "b").rglob("site-*/secure"):
                if secure.parent.name in opened:
                    shutil.copy(opened[secure.parent.name], secure / "opened.json")
        return None

    with pytest.raises(StateError, match="goes into no other one"):
        serve_with(tmp_path / "b", fault, tasks=once, rounds={"deadline": 30, "max_skipped": 1})

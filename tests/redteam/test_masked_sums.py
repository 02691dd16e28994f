"""What a dishonest site can do under masks, where nobody sees its update, and what the sum still shows."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from perennial.client import handlers
from perennial.client.release import Typed
from perennial.client.site import Site
from perennial.foundation.errors import PolicyRefusal, StateError
from perennial.privacy.released import Released
from perennial.privacy.secure.keys import Words
from perennial.privacy.secure.roster import Parameters, Subject
from perennial.protocol.messages import TrainRequest
from tests.privacy.secure_sites import MaskedFederation, attempt_of, subject_of
from tests.strategies.test_secure_runs import events, run, serve_with

Change = Any
"""(words of the dishonest site, before they are masked) -> None, in place."""


def with_liar(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    honest = handlers.update_words

    def update_words(site: Site, request: TrainRequest, typed: Mapping[str, Typed]) -> Released[Words]:
        words = honest(site, request, typed)
        if site.name == "site-0":
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

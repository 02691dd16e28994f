"""What a dishonest site can do under masks, where nobody sees its update, and what the sum still shows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perennial.client import handlers
from perennial.client.site import Site
from perennial.foundation.errors import StateError
from perennial.privacy.secure.masks import Words
from perennial.protocol.messages import TrainReply, TrainRequest
from tests.strategies.test_secure_runs import events, run

Change = Any
"""(words of the dishonest site, before they are masked) -> None, in place."""


def with_liar(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    honest = handlers.update_words

    def update_words(site: Site, request: TrainRequest, reply: TrainReply) -> Words:
        words = honest(site, request, reply)
        if site.name == "site-0":
            change(words)
        return words

    monkeypatch.setattr(handlers, "update_words", update_words)


def enlarge(words: Words) -> None:
    words[:-1] += np.uint64(1 << 52)


def count_more(words: Words) -> None:
    words[-1] = np.uint64(1 << 40)


def times_fifty(words: Words) -> None:
    words[:-1] *= np.uint64(50)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(enlarge, "the mean update has norm"), (count_more, "the sum of the weights is")],
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

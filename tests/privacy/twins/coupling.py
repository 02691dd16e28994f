"""Makes all chance of a run a function of where it is drawn, so that two copies of a site draw alike.

Bytes of the operating system's secure source become a stream that is named by the message they are drawn in.
Who is in a batch is a function of the step and the record's content, so that a record more moves no other.
The clock of the ledger stands still.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from hashlib import shake_256
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from perennial.config import yaml_file
from perennial.learning.batches import TrainingSet
from perennial.privacy.noise import Noise

_streams: list["_Stream"] = []


class _Stream:
    """Bytes that a name decides. Lengths are counted apart: the name of a file shifts no key of noise."""

    def __init__(self, name: str) -> None:
        self._name, self._drawn = name, Counter[int]()

    def __call__(self, count: int) -> bytes:
        self._drawn[count] += 1
        return shake_256(f"{self._name} {count} {self._drawn[count]}".encode()).digest(count)


class _Stopped(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: Any = None) -> "_Stopped":
        return cls(2026, 1, 1, tzinfo=tz or UTC)


def _secret(count: int) -> bytes:
    return _streams[-1](count)


@contextmanager
def drawn_as(name: str) -> Iterator[None]:
    """Inside coupled(): secret bytes are those of this name, and afterwards those of before go on."""
    _streams.append(_Stream(name))
    try:
        yield
    finally:
        _streams.pop()


@contextmanager
def coupled(name: str) -> Iterator[None]:
    """No chance but what names decide. name: of what is drawn outside of any message.

    DP-SGD takes one step in each round, and is charged for one: what one record may move is stated for that.
    """
    from perennial.learning import private_training

    batches = _Batches()
    with ExitStack() as stack:
        stack.enter_context(drawn_as(name))
        for where in ("os.urandom", "random._urandom"):
            stack.enter_context(patch(where, _secret))
        stack.enter_context(patch("perennial.privacy.ledger.datetime", _Stopped))
        # the same few files are read before every answer
        parsed = cache(yaml_file._parse)
        stack.enter_context(
            patch.object(yaml_file, "_parse", lambda text, where: deepcopy(parsed(text, where)))
        )
        for where in ("perennial.config.charges", "perennial.learning.private_training"):
            stack.enter_context(patch(f"{where}.count_round_steps", lambda *_: 1))
        stack.enter_context(patch.object(private_training, "draw_poisson_batches", batches.drawn))
        stack.enter_context(
            patch.object(private_training, "Objective", batches.seen(private_training.Objective))
        )
        random.seed(name)
        yield


class _Batches:
    """Draws batches by step and record. The training set is noted where training begins."""

    def __init__(self) -> None:
        self._data: TrainingSet | None = None

    def seen(self, objective: Any) -> Any:
        """The objective's class, which is given the training set first."""

        def made(config: Any, model: Any, data: TrainingSet, *rest: Any) -> Any:
            self._data = data
            return objective(config, model, data, *rest)

        return made

    def drawn(self, samples: int, sample_rate: float, steps: int, source: Noise) -> Iterator[Tensor]:
        """As poisson_batches(): (B,) int64 for each step."""
        del source
        data = self._data
        assert data is not None
        for step in range(steps):
            if data.patients is None:
                rows = [data.x[row].numpy().tobytes() for row in range(samples)]
            else:  # whose number depends on who else is there
                firsts = [int((data.patients == one).nonzero()[0]) for one in data.patients.unique()]
                rows = [data.x[row].numpy().tobytes() for row in firsts]
            coins = [shake_256(b"%d " % step + row).digest(7) for row in rows]
            share = torch.tensor([int.from_bytes(coin) / 2**56 for coin in coins])
            yield (share < sample_rate).nonzero()[:, 0]

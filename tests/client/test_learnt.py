"""Which rows of a continued run are late: as many of a content as were not noted."""

import random
from collections import Counter

import numpy as np
import pytest

from perennial.client.learnt import Noted, match_noted

Row = tuple[int, int, int]
"""Content, patient, label."""


def noted(rows: list[Row]) -> Noted:
    content, patient, label = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Noted(content, content * 0, patient, label, content * 0)


def late(now: list[Row], known: list[Row]) -> Counter[Row]:
    found = match_noted(noted(now), noted(known))
    return Counter(row for row, was in zip(now, found.tolist(), strict=True) if not was)


def test_one_learnt_row_keeps_its_copies_of_a_later_time_in() -> None:
    assert late([(1, 0, 0)] * 13, [(1, 0, 0)]) == {(1, 0, 0): 12}
    assert late([(1, 0, 1), (1, 0, 0), (1, 0, 1)], [(1, 0, 1)]) == {(1, 0, 0): 1, (1, 0, 1): 1}
    assert late([(1, 0, 1)], [(1, 0, 0)]) == {}, "labelled anew, it was learnt all the same"
    assert late([(1, 7, 0)], [(1, 8, 0)]) == {(1, 7, 0): 1}, "another patient's"


@pytest.mark.parametrize("seed", range(200))
def test_one_learnt_row_more_or_less_moves_one_row(seed: int) -> None:
    draw = random.Random(seed)

    def drawn() -> list[Row]:
        return [(draw.randrange(2), draw.randrange(2), draw.randrange(2)) for _ in range(draw.randrange(6))]

    stayed, gone, new = drawn(), drawn(), drawn()
    now, known = stayed + new, stayed + gone
    draw.shuffle(now)
    target = (draw.randrange(2), draw.randrange(2), draw.randrange(2))
    before = late(now, known)
    erased = late(now, [*known, target])
    assert (before - erased).total() <= 1 and not erased - before
    at = draw.randrange(len(now) + 1)
    assert late([*now[:at], target, *now[at:]], [*known, target]) == before, "it stays: nothing else moves"

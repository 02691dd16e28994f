"""Updates that wait for a second pass are the same in memory and on disk."""

import pytest
import torch
from torch import Tensor

from perennial.strategies.sums import update_file
from perennial.strategies.sums.update_file import UpdateFile

SITES = ["site-3", "site-1", "site-2"]


def updates() -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return {
        site: {
            "weight": torch.randn(4, 5, generator=draw),
            "flag": torch.randint(0, 2, (3,), generator=draw, dtype=torch.uint8),
            "bias": torch.randn(7, generator=draw),
        }
        for site in SITES
    }


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_updates_come_back_as_they_were(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = updates()
    size = 4 * 20 + 3 + 4 * 7
    monkeypatch.setattr(update_file, "KEPT_BYTES", kept * size)
    monkeypatch.setattr(update_file, "PIECE_BYTES", 8 * len(SITES) * 6)
    file = UpdateFile(expected["site-1"])
    for site in SITES:
        file.add(site, expected[site])
    assert len(file) == 3 and file.sites == sorted(SITES)
    assert ("_file" in vars(file)) == (kept < 3), "what fits in memory opens no file"
    found = dict(file)
    assert list(found) == sorted(SITES)
    for site in SITES:
        assert all(torch.equal(found[site][name], tensor) for name, tensor in expected[site].items())
    for _ in range(2):
        parts: dict[str, list[Tensor]] = {}
        for piece in file.pieces():
            parts.setdefault(piece.name, []).append(piece.rows)
        for name, rows in parts.items():
            whole = torch.stack([expected[site][name].flatten().double() for site in sorted(SITES)])
            assert torch.equal(torch.cat(rows, dim=1), whole) and (name != "weight" or len(rows) == 4)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_second_update_of_a_site_takes_the_place_of_its_first(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_file, "KEPT_BYTES", kept * 8)
    file = UpdateFile({"weight": torch.zeros(2)})
    for value in (1.0, 2.0):
        file.add("site-1", {"weight": torch.full((2,), value)})
    assert len(file) == 1
    assert dict(file)["site-1"]["weight"].tolist() == [2.0, 2.0]

"""No sentence of protection is said that an attack has not tried to break."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.attack_cells import ATTACKS, MASKED, cells, policy_of, tried
from benchmarks.privacy_pages import pages
from benchmarks.statements import DRAWS, RESULTS, attacked, drawn, looked_up, page, shown_in
from perennial.client.exposure import channels, protections
from perennial.config.site import SitePolicy
from perennial.privacy.exposure_table import ADVERSARIES, LYING, PROTECTIONS, TABLE

RECORDED = json.loads(RESULTS.with_suffix(".json").read_text())
QUICK = (
    ("sums for class means", "clear"),
    ("sparsity vectors", "clear"),
    ("sparsity vectors", "noise"),
    ("digests", "floor"),
    ("digests", "noise"),
    ("sums of features", "clear"),
    ("sums of features", "noise"),
    ("updates", "noise"),
)


def test_every_no_names_an_attack_that_is_there_and_was_run_in_its_place() -> None:
    run = {(row["channel"], row["protection"], row["adversary"]): row for row in RECORDED["cells"]}
    for cell in TABLE.values():
        for adversary, images, attack in zip(ADVERSARIES, cell.images, cell.attacks, strict=True):
            if images is False:
                assert attack in ATTACKS or attack in MASKED or attack == "difference of two models"
                assert run[cell.channel, cell.protection, adversary]["recovered"] == 0
            if attack and images is not None:
                row = run[cell.channel, cell.protection, adversary]
                assert (row["attack"], row["recovered"] > 0) == (attack, images)
    assert {cell.protection for cell in TABLE.values()} == set(PROTECTIONS)
    assert RESULTS.with_suffix(".md").read_text() == page(RECORDED), "run benchmarks.statements"


def test_no_no_of_500_drawn_policies_is_false() -> None:
    shown = shown_in(RECORDED["cells"])
    policies = [drawn(number)[0] for number in range(DRAWS)]
    assert [words for policy in policies for words in looked_up(policy, shown)] == []
    assert not any(row["false"] for row in RECORDED["draws"])
    # the draws reach nearly every place of the table, so that the lookup is not of a few
    reached = {
        place for policy in policies for place in protections(SitePolicy.model_validate(policy)).items()
    }
    assert reached == set(TABLE)


def test_a_false_no_would_be_noticed() -> None:
    shown = dict.fromkeys(TABLE, True)
    assert any(looked_up(drawn(number)[0], shown) for number in range(20))


@pytest.mark.parametrize(("channel", "protection"), QUICK)
def test_an_attack_comes_to_what_the_table_says(channel: str, protection: str, tmp_path: Path) -> None:
    """A floor of twenty stops neither of the first two: models that see the brightest image alone."""
    cell = next(cell for cell in TABLE.values() if (cell.channel, cell.protection) == (channel, protection))
    found = tried(cell, LYING, tmp_path / "site")
    assert (found.recovered > 0) == found.claimed


@pytest.mark.parametrize("number", [3, 41, 77])
def test_a_drawn_attack_on_a_drawn_policy_makes_no_word_false(number: int, tmp_path: Path) -> None:
    assert not attacked(*drawn(number), tmp_path / "site")["false"]


def test_every_place_has_a_policy_that_leads_to_it() -> None:
    for cell, _ in cells():
        policy_of(cell)


def test_a_large_budget_or_delta_is_no_protection() -> None:
    strong = {"require_privacy": "sample", "max_epsilon": 10.0, "delta": 1e-5}
    for changes, images in (({}, False), ({"max_epsilon": 11.0}, True), ({"delta": 0.01}, True)):
        policy = SitePolicy.model_validate(strong | changes)
        assert any(channel.recovers for channel in channels(policy)) == images


def test_the_pages_are_written_from_the_table() -> None:
    for path, text in pages().items():
        # a page links each term where it first uses it, also in what is written from the table
        found, wanted = (
            re.sub(r"\[([^\]]+)\]\(glossary\.md#[^)]+\)", r"\1", one) for one in (path.read_text(), text)
        )
        assert found == wanted, f"{path.name}: run python -m benchmarks.privacy_pages"

"""Figures that hide different things do not simply add up."""

import math
from dataclasses import replace
from typing import Any

import pytest

from perennial.foundation.errors import PrivacyError
from perennial.privacy.accountants import make_accountant
from perennial.privacy.composition import compose
from perennial.privacy.config import PrivacyConfig, Unit
from perennial.privacy.entries import Entry, Relation

PLACE: dict[str, Any] = {"run": "r", "experiment": "e", "recipient": "server", "kind": "update"}


def gaussian(unit: Unit, relation: Relation, noise: float = 4.0, rate: float = 1.0, steps: int = 1) -> Entry:
    return Entry(
        **PLACE,
        unit=unit,
        relation=relation,
        mechanism="gaussian",
        noise_multiplier=noise,
        sample_rate=rate,
        steps=steps,
    )


def stated(
    epsilon: float, delta: float = 0.0, unit: Unit = "sample", relation: Relation = "replace"
) -> Entry:
    return Entry(**PLACE, unit=unit, relation=relation, mechanism="stated", epsilon=epsilon, delta=delta)


def rdp(*history: tuple[float, float, int], delta: float = 1e-5) -> float:
    return make_accountant("rdp", history).epsilon(delta)


def epsilon(*entries: Entry, unit: Any = None) -> float:
    return compose(entries, 1e-5, "rdp", unit).epsilon


def test_like_releases_compose_through_the_accountant() -> None:
    entries = [gaussian("sample", "add_remove", 1.0, 0.1, 60), gaussian("sample", "add_remove", 1.0, 0.1, 40)]
    cost = compose(entries, 1e-5, "rdp")
    assert cost.epsilon == rdp((1.0, 0.1, 100))
    assert (cost.unit, cost.relation) == ("sample", "add_remove")


def test_a_sample_guarantee_says_nothing_about_the_site() -> None:
    entries = [gaussian("site", "replace"), gaussian("sample", "add_remove")]
    assert epsilon(*entries, unit="site") == math.inf
    assert compose(entries, 1e-5, "rdp").unit == "sample"
    assert epsilon(*entries) == rdp((4.0, 1.0, 2))


def test_central_noise_counts_half_for_a_replaced_site() -> None:
    central = gaussian("site", "add_remove", 4.0)
    assert epsilon(central) == rdp((4.0, 1.0, 1))
    mixed = compose([central, gaussian("site", "replace", 2.0)], 1e-5, "rdp")
    assert mixed.relation == "replace"
    assert mixed.epsilon == rdp((2.0, 1.0, 2))
    # one more sample changes the site's update: for the central sum that is a replacement
    assert epsilon(central, unit="sample") == rdp((2.0, 1.0, 1))


def test_poisson_sampling_pays_group_privacy_beside_a_replace_release() -> None:
    training = gaussian("sample", "add_remove", 2.0, 0.05, 100)
    digest = gaussian("sample", "replace", 4.0)
    cost = compose([training, digest], 1e-5, "rdp")
    assert cost.relation == "replace"
    alone = rdp((2.0, 0.05, 100))
    assert cost.epsilon > 2 * alone + rdp((4.0, 1.0, 1))
    # the delta that was used for the pair is affordable
    pair = (cost.epsilon - rdp((4.0, 1.0, 1), delta=5e-6)) / 2
    used = next(
        d for d in (5e-6 * 0.9**k for k in range(200)) if rdp((2.0, 0.05, 100), delta=d) >= pair - 1e-9
    )
    assert (1 + math.exp(pair)) * used <= 5e-6 * 1.12


def test_stated_releases_add_up_and_use_delta() -> None:
    assert epsilon(stated(0.5), stated(1.25)) == 1.75
    mixed = epsilon(stated(0.5, delta=4e-6), gaussian("sample", "replace"))
    assert mixed == pytest.approx(0.5 + rdp((4.0, 1.0, 1), delta=6e-6), rel=1e-9)
    assert epsilon(stated(0.5, delta=6e-6), stated(0.5, delta=6e-6)) == math.inf


def test_stated_add_remove_pays_twice_beside_a_replace_release() -> None:
    entries = [stated(0.5, relation="add_remove"), stated(1.0)]
    assert epsilon(*entries) == 2 * 0.5 + 1.0
    assert epsilon(stated(0.5, relation="add_remove")) == 0.5
    costly = [stated(800.0, 1e-9, relation="add_remove"), stated(1.0)]
    assert epsilon(*costly) == math.inf
    # without a delta nothing is multiplied by e^epsilon
    assert epsilon(stated(800.0, relation="add_remove"), stated(1.0)) == 2 * 800.0 + 1.0


@pytest.mark.parametrize(
    ("mode", "unit", "relation", "noise", "trusts"),
    [
        ("client_local", "site", "replace", 1.5, False),
        ("client_central", "site", "add_remove", 3.0, True),
        ("sample", "sample", "add_remove", 3.0, False),
    ],
)
def test_the_entry_of_each_mode(mode: Any, unit: str, relation: str, noise: float, trusts: bool) -> None:
    rate = 0.1 if mode == "sample" else None
    privacy = PrivacyConfig(mode=mode, clip_norm=1.0, noise_multiplier=3.0, sample_rate=rate)
    entry = Entry.of_update(privacy, run="r", experiment="e", recipient="server", sample_rate=0.1, steps=20)
    assert (entry.unit, entry.relation, entry.noise_multiplier, entry.trusts_server) == (
        unit,
        relation,
        noise,
        trusts,
    )
    assert (entry.sample_rate, entry.steps) == ((0.1, 20) if mode == "sample" else (1.0, 1))


@pytest.mark.parametrize("mode", ["client_local", "client_central", "sample"])
def test_seeded_noise_hides_nothing(mode: Any) -> None:
    secure = PrivacyConfig(
        mode=mode, sample_rate=0.1 if mode == "sample" else None, clip_norm=1.0, noise_multiplier=3.0
    )
    one = Entry.of_update(secure, run="r", experiment="e", recipient="s")
    other = replace(one, seeded=True)  # as a ledger of an earlier release has it
    assert (one.protected, other.protected) == (True, False)
    cost = compose([one, other, one], 1e-5, "rdp")
    assert (cost.epsilon, cost.unprotected) == (math.inf, 1)
    assert math.isfinite(compose([one, one], 1e-5, "rdp").epsilon)
    assert Entry.from_json(other.to_json()) == other


@pytest.mark.parametrize(
    "values",
    [
        {"mechanism": "gaussian", "noise_multiplier": 1.0},
        {"mechanism": "gaussian", "noise_multiplier": -1.0, "sample_rate": 1.0, "steps": 1},
        {"mechanism": "gaussian", "noise_multiplier": 1.0, "sample_rate": 0.0, "steps": 1},
        {"mechanism": "gaussian", "noise_multiplier": float("nan"), "sample_rate": 1.0, "steps": 1},
        {"mechanism": "stated", "epsilon": float("inf"), "delta": 0.0},
        {"mechanism": "stated", "epsilon": 1.0, "delta": 1.0},
        {"mechanism": "stated", "epsilon": 1.0},
        {"mechanism": "unprotected", "epsilon": 1.0, "delta": 0.0},
        {"mechanism": "laplace", "epsilon": 1.0, "delta": 0.0},
        {"mechanism": "unprotected", "unit": "person"},
    ],
)
def test_entries_that_do_not_say_what_they_cost_are_refused(values: dict[str, Any]) -> None:
    fields: dict[str, Any] = PLACE | {"unit": "sample", "relation": "replace"} | values
    with pytest.raises(PrivacyError):
        Entry(**fields)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 1.5},
        {"steps": True},
        {"noise_multiplier": "4"},
        {"extra": 1},
        {"recipient": None},
        {"trusts_server": 1},
        {"seeded": "yes"},
    ],
)
def test_mistyped_lines_are_refused(change: dict[str, Any]) -> None:
    line = gaussian("site", "replace").to_json()
    assert Entry.from_json(line) == gaussian("site", "replace")
    with pytest.raises(PrivacyError):
        Entry.from_json(line | change)

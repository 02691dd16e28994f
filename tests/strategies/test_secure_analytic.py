"""Closed form under masks: the same sums and the same model as without, cohorts of late sites, refusals."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Message

from perennial.client.policy import check_statistics
from perennial.config import charges
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.rounds import MAX_SAMPLES
from perennial.config.secure_words import share_of_noise
from perennial.config.site import SitePolicy
from perennial.foundation.errors import ConfigError, PolicyRefusal
from perennial.learning.analytic.statistics import PRODUCT
from perennial.models.feature_maps.projection import GRID
from perennial.privacy.noise import Noise
from perennial.privacy.noised_sums import SumsNoise, add_noise_to_sums
from perennial.privacy.released import Released
from perennial.privacy.secure.roster import MOST_SITES
from perennial.protocol.tensors import Tensors
from perennial.server.withdrawal import withdraw
from perennial.strategies.analytic.site import _encode_words
from tests.strategies.test_analytic_runs import EXPERIMENT, experiment, own_cache, run, sums_of  # noqa: F401
from tests.strategies.test_secure_runs import Killed, events, gone, serve_dying, serve_file

SECURE: dict[str, Any] = {"least": 3}
SMALL: dict[str, Any] = {"data": {"samples_limit": 200}, "tasks": {"count": 2, "rounds": 1}}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (sums_of(one), one["model_sha256"]) == (sums_of(other), other["model_sha256"])


def notes(folder: Path, name: str) -> str:
    return " ".join(event["text"] for event in events(folder, name) if event["event"] == "note")


def written(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment(**{**SMALL, "secure": SECURE} | changes)))
    return path


@pytest.mark.parametrize(
    "strategy",
    [{"head": "ridge", "shrinkage": 0.01}, {"head": "gaussian", "shrinkage": "validation"}],
    ids=["ridge", "gaussian by validation"],
)
def test_sums_and_model_have_the_same_bits_with_masks_and_without(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    clear = run(tmp_path, "clear", strategy=strategy)
    off = run(tmp_path, "off", strategy=strategy, secure=SECURE | {"masks": False})
    on = run(tmp_path, "on", strategy=strategy, secure=SECURE)
    assert same(clear, on) and same(clear, off)
    assert on["analytic"]["samples"] == clear["analytic"]["samples"]
    assert on["final_accuracy"] == clear["final_accuracy"]
    assert not on["analytic"]["withdrawable"]
    assert not (tmp_path / "runs" / "on" / "statistics").exists()


def test_late_sites_give_their_sums_together_or_wait(tmp_path: Path) -> None:
    """Sites 4 and 5 are away in task 1, site 6 in tasks 1 and 2. Alone they would be read off the model."""
    data = SMALL["data"] | {"sites": 7}
    tasks = {"count": 4, "rounds": 1}
    away = [
        {"site": f"site-{site}", "first_round": 1, "last_round": last}
        for site, last in ((4, 1), (5, 1), (6, 2))
    ]
    clear = run(tmp_path, "clear", data=data, tasks=tasks)
    on = run(tmp_path, "on", data=data, tasks=tasks, secure=SECURE, absence=away)
    told = notes(tmp_path, "on")
    assert "round 2: task 1: site-4, site-5 wait for others: a sum takes 3 sites" in told
    assert "round 3: task 2: site-6 wait for others: a sum takes 3 sites" in told
    assert "round 4: task 1" not in told and "round 4: task 2: site-6 wait" in told
    assert not same(clear, on)
    short = run(tmp_path, "short", data=data, tasks=tasks, absence=[away[2] | {"first_round": 2}])
    assert same(short, run(tmp_path, "again", data=data, tasks=tasks, absence=[away[2] | {"first_round": 2}]))
    # all but site 6's sums of task 2 are there
    assert on["analytic"]["samples"] < clear["analytic"]["samples"]


def test_cohort_that_comes_back_together_leaves_nothing_missing(tmp_path: Path) -> None:
    data = SMALL["data"] | {"sites": 6}
    away = [{"site": f"site-{site}", "first_round": 1, "last_round": 1} for site in (3, 4, 5)]
    clear = run(tmp_path, "clear", data=data, tasks=SMALL["tasks"])
    on = run(tmp_path, "on", data=data, tasks=SMALL["tasks"], secure=SECURE, absence=away)
    assert same(clear, on)


def test_site_that_falls_out_is_in_no_sum(tmp_path: Path) -> None:
    def fault(message: Message, node: int, kind: str) -> Message | None:
        return gone(message) if node == 4 and kind == "StatisticsRequest" else None

    found, _ = serve_file(written(tmp_path), fault)
    away = [{"site": "site-3", "first_round": 1}]
    expected = run(tmp_path / "expected", "clear", **SMALL, absence=away)
    assert same(found, expected)
    rounds = [event for event in events(tmp_path, "analytic") if event["event"] == "round"]
    assert all(event["participants"] == ["site-0", "site-1", "site-2"] for event in rounds)


@pytest.mark.parametrize("after", [False, True], ids=["before the site answers", "after it"])
@pytest.mark.parametrize("phase", ["ShareRequest", "StatisticsRequest", "VoteRequest", "OpenRequest"])
def test_server_that_is_killed_in_any_phase_goes_on_to_the_same_bits(
    tmp_path: Path, phase: str, after: bool
) -> None:
    met: list[str] = []

    def fault(message: Message, node: int, kind: str) -> Message | None:
        if kind == phase and node == 2:
            met.append(kind)
            if len(met) == 2:
                raise Killed
        return None

    whole = run(tmp_path / "whole", "clear", **SMALL)
    path = written(tmp_path)
    with pytest.raises(Killed):
        serve_dying(path, fault, after)
    assert same(whole, serve_file(path, lambda *_: None, resume=True)[0])


def test_opening_that_failed_comes_before_any_other_sum(tmp_path: Path) -> None:
    """Task 1 is not opened at first. Its round is asked again, and opens it; then comes task 2."""
    tried: dict[int, int] = {}

    def fault(message: Message, node: int, kind: str) -> Message | None:
        if kind == "OpenRequest":
            tried[node] = tried.get(node, 0) + 1
        return gone(message) if kind == "OpenRequest" and node > 1 and tried[node] == 1 else None

    found, _ = serve_file(written(tmp_path), fault)
    assert same(found, run(tmp_path / "whole", "clear", **SMALL))
    rounds = [event for event in events(tmp_path, "analytic") if event["event"] == "round"]
    assert [(event["round"], event["skipped"]) for event in rounds] == [(1, True), (1, False), (2, False)]


def test_classes_that_were_opened_go_into_no_sum_of_other_tasks(tmp_path: Path) -> None:
    """A second run divides the same classes into other tasks; its sites are the first one's."""
    state = {"secure": SECURE, "data": SMALL["data"]}
    run(tmp_path, "first", **state, tasks={"count": 2, "rounds": 1})
    for folder in (tmp_path / "runs" / "first").rglob("secure/opened.json"):
        opened = [statistic for statistic, *_ in yaml.safe_load(folder.read_text())]
        assert opened.count("statistics") == 10
        break
    else:
        pytest.fail("no site wrote down what was opened")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": {"head": "balanced_ridge"}}, "sums go into one opened sum"),
        ({"secure": {"least": 5}}, "a sum needs 5"),
    ],
)
def test_what_does_not_go_under_masks_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment(**{"secure": SECURE} | changes)))
    with pytest.raises(ConfigError, match=reason):
        load_experiment(path)


def test_no_site_is_taken_out_of_masked_sums(tmp_path: Path) -> None:
    run(tmp_path, "masked", **SMALL, secure=SECURE)
    with pytest.raises(ConfigError, match="secure: the server has sums over sites only"):
        withdraw(tmp_path / "runs" / "masked", "site-1")


# noise that the sites share

SHARED: dict[str, Any] = {
    "privacy": {
        "mode": "sample_shared",
        "release": "sums",
        "noise_multiplier": 1.0,
        "accountant": "rdp",
    },
    "strategy": {"head": "ridge", "shrinkage": 0.01, "standardise": False},
    "secure": {"least": 3, "quorum": 4, "assumed_colluders": 1},
    "evaluation": {"federated": False},
}


def test_claim_names_unit_adversary_neighbours_mechanism_and_accountant(tmp_path: Path) -> None:
    privacy = SHARED["privacy"]
    summary = run(tmp_path, "claim", **SMALL | SHARED | {"privacy": privacy})
    alone = {"mode": "sample", "release": "sums", "noise_multiplier": 1.0, "accountant": "rdp"}
    rest: dict[str, Any] = {key: SHARED[key] for key in ("strategy", "evaluation")}
    rest["privacy"] = alone
    local = run(tmp_path, "alone", **SMALL | rest)
    assert summary["analytic"]["samples"] is None
    claim = summary["epsilon"]
    assert claim["value"] == pytest.approx(local["epsilon"]["value"], rel=1e-3)
    assert claim["value"] >= local["epsilon"]["value"]
    report = (tmp_path / "runs" / "claim" / "report.html").read_text()
    for words in (
        "one training sample of one site",
        "up to secure.assumed_colluders sites together",
        "one training sample is added or removed",
        "variance 1 / m of it",
        "rdp",
    ):
        assert words in report


def test_shares_come_to_the_noise_of_one_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four shares of which three are honest: 4/3 of the variance that one site would add alone."""
    found = experiment(**SMALL | SHARED)
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(found))
    settings = load_experiment(path)
    width = 120
    zero = torch.zeros(width * (width + 1) // 2, dtype=torch.int64)
    sums, counts = torch.zeros(5, width, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    multiplier = share_of_noise(settings, 1.0)
    parts = [add_noise_to_sums(zero, sums, counts, multiplier, Noise()) for _ in range(4)]
    whole = SumsNoise.of(math.sqrt(4 / 3), width)
    gram = torch.stack([part[0] for part in parts]).sum(0).double() / PRODUCT
    rows = torch.triu_indices(width, width)
    above = gram[rows[0] != rows[1]]
    features = torch.stack([part[1] for part in parts]).sum(0).double() / GRID
    assert float(above.std()) == pytest.approx(whole.gram / math.sqrt(2), rel=0.05)
    assert float(features.std()) == pytest.approx(whole.sums, rel=0.15)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secure": {"least": 3}}, "needs `secure` with a quorum"),
        ({"privacy": SHARED["privacy"] | {"release": "updates"}}, "release"),
        ({"privacy": SHARED["privacy"] | {"accountant": "prv"}}, "allowed 'rdp'"),
        (
            {
                "secure": SHARED["secure"] | {"masks": False},
                "privacy": SHARED["privacy"],
            },
            "secure.masks: found false",
        ),
    ],
)
def test_claims_that_would_be_false_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment(**{**SMALL, **SHARED, **changes})))
    with pytest.raises(ConfigError, match=reason):
        load_experiment(path)


def test_site_that_wants_noise_of_its_own_takes_no_share_of_others() -> None:
    content = {**EXPERIMENT, **SHARED, "strategy": {"name": "analytic", **SHARED["strategy"]}}
    content["privacy"] = SHARED["privacy"]
    shared = Experiment.model_validate(content)
    for demand in ("sample", "client_shared"):
        policy = SitePolicy(answers=["statistics"], require_privacy=demand, max_epsilon=8.0)
        with pytest.raises(PolicyRefusal, match="require_privacy"):
            check_statistics(policy, shared)
    check_statistics(
        SitePolicy(answers=["statistics"], require_privacy="sample_shared", max_epsilon=8.0), shared
    )


def test_range_of_words_follows_from_no_request_and_has_room_for_every_site() -> None:
    """A bound that a request moved would tell the number of samples, by bisection, with no sum opened."""
    mechanism = charges.price_clear_release(Experiment.model_validate(experiment(**SMALL)), "a" * 16, "sums")

    def words(samples: int) -> Any:
        sums = {name: torch.tensor([samples * PRODUCT]) for name in ("gram", "sums", "counts")}
        return _encode_words(Released(Tensors(sums), mechanism))

    assert int(words(MAX_SAMPLES).value.max()) * MOST_SITES < 1 << 62
    with pytest.raises(PolicyRefusal, match="100 sums as large as this site.s fit no 64-bit words"):
        words(20 * MAX_SAMPLES)

"""Noised sums at a deployed site: the door bounds training's steps alone, and lets sums in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.cli.check import check_command
from perennial.client.identity import Identity
from perennial.client.site import open_site
from perennial.foundation.errors import DataError
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.protocol.messages import StatisticsReply, StatisticsRequest
from perennial.strategies.analytic.withdrawn_records import write_withdrawn_sums
from tests.redteam.attacked_hospital import RUN, TABLE, Hospital, write_table
from tests.redteam.attacked_hospital import SUMS as TABLE_SUMS

SUMS: dict[str, Any] = {
    "model": {"name": "features", "features": [{"name": "random", "width": 12}]},
    "tasks": {"count": 2, "rounds": 1},
    "learner": None,
    "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.01},
    "privacy": {"mode": "sample", "release": "sums", "noise_multiplier": 4.0},
    "evaluation": {"federated": False},
}
POLICY = {"answers": ["statistics"], "require_privacy": "sample", "max_epsilon": 3.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def test_a_site_answers_with_noised_sums_and_charges_them(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, POLICY, **SUMS)
    request = StatisticsRequest(
        **hospital.stamp(), of_task=1, features=hospital.site.models.load_fixed_features().content
    )
    assert isinstance(hospital.ask(request), StatisticsReply), hospital.refusal
    (entry,) = hospital.site.identity.ledger.read_entries()
    assert (entry.kind, entry.unit, entry.mechanism, entry.noise_multiplier) == (
        "statistics",
        "sample",
        "gaussian",
        4.0,
    )


def test_the_check_of_a_site_shows_an_experiment_of_noised_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hospital = Hospital(tmp_path, POLICY, **SUMS)
    check_command(hospital.site_file, hospital.file)
    said = capsys.readouterr().out
    assert "site site-1" in said and "would refuse" not in said


def test_a_record_without_finite_features_is_left_out_and_no_refusal_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = Hospital(tmp_path, POLICY, **SUMS)
    finished, spoilt = FixedFeatures.finished, []

    def with_a_hole(self: FixedFeatures, mapped: torch.Tensor) -> torch.Tensor:
        features = finished(self, mapped)
        if not spoilt:
            features[0, 0] = float("nan")
            spoilt.append(True)
        return features

    monkeypatch.setattr(FixedFeatures, "finished", with_a_hole)
    request = StatisticsRequest(
        **hospital.stamp(), of_task=1, features=hospital.site.models.load_fixed_features().content
    )
    assert isinstance(hospital.ask(request), StatisticsReply), hospital.refusal
    assert spoilt and len(hospital.site.identity.ledger.read_entries()) == 1


def test_samples_without_features_do_not_count_towards_the_floor(tmp_path: Path) -> None:
    """19 of a class's 20 rows are the public mean, so that its sums would be the features of one."""
    table = [["0", "0", "ill"]] * 19 + [["1.5", "-0.5", "ill"]]
    table += [[f"{place / 10}", "1", label] for label in ("well", "better") for place in range(1, 21)]
    changes: dict[str, Any] = {
        **TABLE_SUMS,
        "privacy": None,
        "evaluation": None,
        "data": TABLE | {"classes": ["ill", "well", "better"]},
        "model": {"name": "features", "features": [{"name": "inputs"}]},
    }
    policy = {"answers": ["statistics"], "min_samples": 20}
    hospital = Hospital(tmp_path, policy, write_table(tmp_path / "data", table), **changes)
    key = "a1" * 32
    site = open_site(Identity.of_site(hospital.config, hospital.experiment), split_key=key)
    stamp: Any = hospital.stamp() | {"split_key": key}
    request = StatisticsRequest(**stamp, of_task=1, features=site.models.load_fixed_features().content)
    reply = hospital.ask(request)
    assert isinstance(reply, StatisticsReply), hospital.refusal
    counts = dict(zip(site.process.registry.classes, reply.statistics["counts"].tolist(), strict=True))
    # one more class stays, because the total may be known
    assert counts["ill"] == 0 and sorted(counts.values()) == [0, 0, 20]
    ill = torch.arange(20)
    with pytest.raises(DataError, match="nothing to take back"):
        write_withdrawn_sums(site, RUN, ill, tmp_path / "ill.safetensors", {})

"""A server that wants patients' images, against a real ClientApp: what it gets is what the policy says."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from perennial.client.policy import describe_leaving
from perennial.config.site import SitePolicy
from perennial.foundation.errors import StateError
from tests.redteam.attacked_hospital import POLICIES, Hospital
from tests.redteam.hostile_server import ATTACKS, attacked, overrides

QUICK = [name for name in ATTACKS if name not in ("counts, pixel by pixel",)]
NOISED = "update in mode sample, imprinted model"


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_fails_at_the_template(name: str, tmp_path: Path) -> None:
    outcome = attacked(name, "template", tmp_path)
    assert outcome.recovered == 0
    if name != NOISED:
        # the noised update leaves, as it may; all others meet a rule that is named
        named = ("policy.", "run config", "lends", "repeated request")
        assert outcome.refusal.split(": ")[1].startswith(named)


@pytest.mark.parametrize("name", ["ring, one sample a segment"])
def test_the_floor_is_asked_after_every_cut(name: str, tmp_path: Path) -> None:
    outcome = attacked(name, "floor of 20", tmp_path)
    assert outcome.recovered == 0
    assert "policy.min_samples" in outcome.refusal
    # the same programs get everything where there is no floor, so that they would notice if there were none
    without = attacked(name, "open", tmp_path / "open")
    assert without.recovered == without.of


def test_counts_of_few_samples_stay_and_questions_end(tmp_path: Path) -> None:
    floor = attacked("counts, pixel by pixel", "floor of 20", tmp_path / "floor")
    assert floor.recovered == 0 and "policy.min_samples" in floor.refusal
    bounded = attacked("counts, pixel by pixel", "defaults", tmp_path / "bounded")
    assert bounded.recovered == 0 and "repeated request" in bounded.refusal


@pytest.mark.parametrize("name", QUICK)
def test_an_open_site_gives_what_it_is_said_to_give(name: str, tmp_path: Path) -> None:
    outcome = attacked(name, "open", tmp_path)
    if name in (NOISED, "settings of the run"):
        assert outcome.recovered == 0
    else:
        assert outcome.recovered > 0 and outcome.refusal == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in QUICK])
def test_an_open_site_gives_the_rest_too(name: str, tmp_path: Path) -> None:
    outcome = attacked(name, "open", tmp_path)
    assert outcome.recovered == outcome.of


def said_of(policy: dict[str, Any]) -> str:
    rules = {key: value for key, value in policy.items() if key != "max_repeats"}
    return "\n".join(describe_leaving(SitePolicy.model_validate(rules)))


def test_site_check_speaks_of_the_policy_and_not_by_heart() -> None:
    template = said_of(POLICIES["template"])
    assert "train: updates of the model, and sums for class means: with noise" in template

    assert "epsilon 8 at delta 1e-05 for one sample" in template and "WITHOUT" not in template
    opened = said_of(POLICIES["open"])
    assert "evaluate: counts of right answers: WITHOUT NOISE" in opened
    central = said_of({"require_privacy": "client_central", "max_epsilon": 8})
    assert "the server adds the noise, and sees this site's values without it" in central
    masked = said_of({"require_secure": True, "answers": ["statistics"]})
    assert "statistics: sums of features: in masked sums WITHOUT NOISE" in masked
    assert said_of({"answers": []}).endswith("nothing: no request is answered")


def test_a_run_config_that_overrides_the_approved_experiment_gets_nothing(tmp_path: Path) -> None:
    private = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.1}
    bound = Hospital(tmp_path, POLICIES["defaults"], privacy=private, evaluation={"federated": False})
    refused = overrides(bound)
    assert refused.recovered == 0 and "run config" in refused.refusal


def test_an_experiment_that_was_not_approved_is_refused_by_its_name(tmp_path: Path) -> None:
    from perennial.protocol.messages import DescribeRequest
    from perennial.protocol.stamp import VERSION

    hospital = Hospital(tmp_path, POLICIES["open"])
    request = DescribeRequest(version=VERSION, experiment=hospital.experiment.digest)
    hospital.ask(request, digest="0" * 64)
    assert "policy: run config: digest: found" in hospital.refusal
    assert f"approved here: hostile {hospital.experiment.digest:.16}" in hospital.refusal


def test_what_was_approved_runs_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    """The site takes the experiment from its record; a record that was changed is one of nothing."""
    from perennial.client.identity import identify

    hospital = Hospital(tmp_path, POLICIES["open"])
    hospital.file.write_text("name: other\n")
    place: dict[str, Any] = {"site": str(hospital.site_file)}
    run: dict[str, Any] = {"digest": hospital.experiment.digest, "experiment": str(hospital.file)}
    context = Context(1, 1, place, RecordDict(), run)
    assert identify(context).experiment == hospital.experiment
    (record,) = hospital.config.approvals.glob("*.json")
    record.chmod(0o644)
    record.write_text(record.read_text().replace("seed: 5", "seed: 6"))
    with pytest.raises(StateError, match="was changed since the approval"):
        identify(context)

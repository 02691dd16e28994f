"""Each protection mode in whole small runs: what travels, what is noised, what is counted and refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml

from perennial.client.exemplars import share_by_hash
from perennial.config.experiment import load_experiment
from perennial.config.learner import LearnerConfig, Optimizer
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, PrivacyError, StateError
from perennial.learning.private_training import train_privately
from perennial.privacy.accountants import make_accountant
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.server.preflight import CentralPrivacy, check_privacy
from perennial.server.releases import Releases
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Disclosures
from tests.forks import run_code
from tests.rounds import begun, context
from tests.seeded_noise import SeededNoise

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 4, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {
        "preset": "none",
        "epochs": 1,
        "batch_size": 16,
        "optimizer": {"lr": 0.1},
        "classification": "ce",
    },
    "evaluation": {"federated": False},
}
CENTRAL = {"mode": "client_central", "clip_norm": 0.5, "noise_multiplier": 2.0}
SAMPLE = {
    "mode": "sample",
    "clip_norm": 1.0,
    "noise_multiplier": 1.0,
    "sample_rate": 0.25,
}
KILLED = """
import os, sys
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
def listener(event):
    if event["event"] == "round" and event["round"] == 3:
        os.kill(os.getpid(), 9)
run_in_process(RunSettings(sys.argv[1], runs=sys.argv[2]), listener=listener)
"""


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    return run_in_process(RunSettings(write(folder, **changes), runs=str(folder / "runs")))


def charged(folder: Path) -> dict[str, int]:
    sites = folder / "runs" / "small" / "sites"
    return {path.name: len(Ledger(path).read_entries()) for path in sorted(sites.glob("site-*"))}


def test_central_noise_is_charged_at_the_sites_and_counted_at_the_server(tmp_path: Path) -> None:
    summary = run(tmp_path, privacy=CENTRAL)
    epsilon = summary["epsilon"]
    expected = make_accountant("prv", [(2.0, 1.0, 4)]).epsilon(1e-5)
    assert epsilon["value"] == pytest.approx(expected)
    assert epsilon["per_site"] == {f"site-{k}": pytest.approx(expected) for k in range(4)}
    assert epsilon["claim"]["adversary"].endswith("the server is trusted")
    assert charged(tmp_path) == {f"site-{k}": 4 for k in range(4)}
    (entry, *_) = Ledger(tmp_path / "runs/small/sites/site-0").read_entries()
    assert entry.trusts_server and entry.noise_multiplier == 2.0


def test_central_noise_has_the_size_of_the_largest_weight(tmp_path: Path) -> None:
    strategy = FedAvg()
    privacy = PrivacyConfig.model_validate(CENTRAL)
    central = CentralPrivacy.of(privacy, strategy)
    assert central is not None
    outcome = RoundOutcome(arrays={"w": torch.zeros(200_000)}, asked=4)
    central.finish_round(outcome)
    assert outcome.arrays is not None
    assert float(outcome.arrays["w"].std()) == pytest.approx(2.0 * 0.5 / 4, rel=0.01)


def test_a_skipped_round_releases_nothing() -> None:
    central = CentralPrivacy.of(PrivacyConfig.model_validate(CENTRAL), FedAvg())
    assert central is not None
    outcome = RoundOutcome()
    central.finish_round(outcome)
    assert outcome.skipped


def test_the_weights_of_the_others_do_not_follow_who_answers() -> None:
    """Three of four sites answer, one claims many samples: each still enters with weight 1/4."""
    strategy = FedAvg()
    strategy.fixed_weights = True
    round_ = begun(strategy, {"w": torch.zeros(2)}, asked=4)
    for site, examples in (("a", 1), ("b", 1), ("c", 1_000_000)):
        round_.add(Admitted(site, {"w": torch.ones(2)}, 2**0.5, examples))
    assert torch.equal(round_.result()["w"], torch.full((2,), 0.75))
    assert strategy.largest_weight(4) == 0.25


def test_a_strategy_without_a_bound_is_refused() -> None:
    class Weighs(FedAvg):
        def weight(self, reply: Admitted) -> float:
            return 2.0

    with pytest.raises(PrivacyError, match="does not bound the weight"):
        CentralPrivacy.of(PrivacyConfig.model_validate(CENTRAL), Weighs())


def test_the_server_measures_again_what_sites_were_told_to_clip() -> None:
    central = CentralPrivacy.of(PrivacyConfig.model_validate(CENTRAL), FedAvg())
    assert central is not None
    told = context({"w": torch.zeros(1)}).request
    told = replace(told, max_update_norm=central.max_update_norm)
    assert FedAvg().build_context(cast(Any, None), told).max_update_norm == pytest.approx(0.5, rel=1e-4)


def test_a_round_repeated_after_a_kill_is_answered_and_charged_once(tmp_path: Path) -> None:
    path = write(tmp_path, privacy=CENTRAL)
    runs = tmp_path / "runs"
    killed = run_code(KILLED, path, str(runs))
    assert killed.returncode == -9
    summary: dict[str, Any] = run_in_process(RunSettings(path, runs=str(runs), resume="yes"))
    assert charged(tmp_path) == {f"site-{k}": 4 for k in range(4)}
    expected = make_accountant("prv", [(2.0, 1.0, 4)]).epsilon(1e-5)
    assert summary["epsilon"]["value"] == pytest.approx(expected)


def test_secure_noise_is_fresh_in_every_run(tmp_path: Path) -> None:
    changes = {"privacy": CENTRAL}
    path = write(tmp_path, **changes)
    first, second = (
        run_in_process(RunSettings(path, runs=str(tmp_path / name)))["model_sha256"] for name in "ab"
    )
    assert first != second


def test_sample_mode_accounts_every_step_and_tells_no_count(tmp_path: Path) -> None:
    memory = {"selection": "random", "share": 0.5}
    learner = SMALL["learner"] | {"memory": memory, "distillation": {"weight": 0.5}}
    summary = run(tmp_path, privacy=SAMPLE, learner=learner)
    expected = make_accountant("prv", [(1.0, 0.25, 16)]).epsilon(1e-5)
    assert summary["epsilon"]["value"] == pytest.approx(expected)
    assert summary["epsilon"]["unit"] == "sample"
    assert {site["samples"] for site in summary["sites"].values()} == {1}
    (entry, *_) = Ledger(tmp_path / "runs/small/sites/site-0").read_entries()
    assert (entry.unit, entry.sample_rate, entry.steps) == ("sample", 0.25, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"memory": {"selection": "herding", "per_class": 2}}, "selection: random"),
        ({"memory": {"selection": "random", "per_class": 2}}, r"memory\.share"),
        ({"memory": {"selection": "random", "share": 0.2, "balanced": True}}, "opacus#813"),
        ({"classification": "balanced_softmax"}, "such as classification ce"),
        ({"contrastive": {"weight": 0.1}}, r"learner\.contrastive"),
    ],
)
def test_learners_that_void_sample_mode_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PrivacyError, match=reason):
        run(tmp_path, privacy=SAMPLE, learner=SMALL["learner"] | changes)


def test_a_precision_that_private_steps_do_not_have_is_refused(tmp_path: Path) -> None:
    learner = SMALL["learner"] | {"precision": "bfloat16"}
    with pytest.raises(ConfigError, match=r"learner\.precision: found 'bfloat16' .* allowed: float32"):
        load_experiment(Path(write(tmp_path, privacy=SAMPLE, learner=learner)))
    load_experiment(Path(write(tmp_path, privacy=CENTRAL, learner=learner)))


def test_batch_norm_is_refused_under_privacy(tmp_path: Path) -> None:
    with pytest.raises((PrivacyError, ConfigError), match="group"):
        run(tmp_path, privacy=SAMPLE, model={"name": "small_cnn", "norm": "batch"})


def test_facts_of_the_strategy_and_the_data_are_refused(tmp_path: Path) -> None:
    class Asks(FedAvg):
        def disclosures(self) -> Disclosures:
            return Disclosures(weights_use_metrics=True, clear_uploads=("control_variate",), sparsity="none")

    experiment = load_experiment(Path(write(tmp_path, privacy=SAMPLE)))
    with pytest.raises(PrivacyError) as refusal:
        check_privacy(experiment, Asks(), estimated_constants=True)
    for reason in ("report in the clear", "control_variate", "sparsity vector", r"data.normalise"):
        assert reason in str(refusal.value)


def test_a_share_of_exemplars_does_not_depend_on_the_others() -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 400, dtype=np.uint64)
    labels = torch.arange(400) % 3
    kept = set(hashes[share_by_hash(hashes, labels, 0.3).numpy()].tolist())
    without = hashes[1:]
    assert set(without[share_by_hash(without, labels[1:], 0.3).numpy()].tolist()) == kept - {int(hashes[0])}
    assert 80 < len(kept) < 160
    assert share_by_hash(hashes[:0], labels[:0], 0.3).shape == (0,)


def test_a_batch_norm_model_never_reaches_private_training() -> None:
    from perennial.data.config import AugmentationConfig
    from perennial.models.config import ModelConfig
    from perennial.models.factory import build_model
    from perennial.models.flat import FlatParameters

    model = build_model(
        ModelConfig.model_validate({"name": "small_cnn", "norm": "batch"}), (1, 8, 8), 2, seed=1
    )
    from perennial.learning.batches import TrainingSet

    data = TrainingSet(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]), torch.zeros(1), torch.ones(1))
    with pytest.raises(PrivacyError, match="BatchNorm"):
        train_privately(
            LearnerConfig(optimizer=Optimizer(lr=0.1)),
            PrivacyConfig.model_validate(SAMPLE),
            model,
            FlatParameters(model),
            data,
            SeededNoise(np.random.Generator(np.random.PCG64(1))),
            augmentation=AugmentationConfig(),
        )


UPDATE = Entry(
    run="r",
    experiment="e",
    recipient="server",
    kind="update",
    unit="site",
    relation="replace",
    mechanism="gaussian",
    noise_multiplier=0.5,
    sample_rate=1.0,
    steps=1,
)


def test_asked_minus_refused_is_what_is_counted(tmp_path: Path) -> None:
    releases = Releases(tmp_path)
    assert releases.list_charged() == {}
    releases.asked(1, ["a", "b"], [UPDATE])
    releases.refused(1, ["b"], [UPDATE])
    releases.asked(2, ["a", "b"], [UPDATE])
    assert releases.list_charged() == {"a": [UPDATE] * 2, "b": [UPDATE]}
    with releases.path.open("ab") as file:
        file.write(b'{"round": 3, "ask')
    assert releases.list_charged() == {"a": [UPDATE] * 2, "b": [UPDATE]}
    releases.asked(3, ["a"], [UPDATE])
    assert releases.list_charged() == {"a": [UPDATE] * 3, "b": [UPDATE]}
    releases.path.write_bytes(b"damage\n" + releases.path.read_bytes())
    with pytest.raises(StateError, match="line 1"):
        releases.list_charged()


def test_what_is_sent_again_is_counted_once_and_other_kinds_are_no_rounds(tmp_path: Path) -> None:
    releases, digest = Releases(tmp_path), replace(UPDATE, kind="digest")
    for _ in range(3):
        releases.asked(1, ["a", "b", "c"], [digest, digest], once="digest-1")
    releases.refused(1, ["b"], [digest, digest], once="digest-1")
    for _ in range(3):
        releases.refused(1, ["c"], [digest, digest], once="digest-1")
    releases.asked(2, ["a"], [digest, digest], once="digest-2")
    # b said no once: what it did the other times may have left
    assert releases.list_charged() == {"a": [digest] * 4, "b": [digest] * 2, "c": []}


@pytest.mark.parametrize(
    "line", ['{"round": 1, "asked": ["a"]}', "[]", '{"asked": [1], "once": "", "entries": []}']
)
def test_a_line_that_is_none_of_ours_is_damage(tmp_path: Path, line: str) -> None:
    releases = Releases(tmp_path)
    releases.path.write_text(line + "\n")
    with pytest.raises(StateError, match="line 1 is damaged"):
        releases.list_charged()

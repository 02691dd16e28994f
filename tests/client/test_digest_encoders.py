"""Encoders of digests: random, trained or of torchvision; the same everywhere, or refused by name."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save
from torch import Tensor

from perennial.cli.encoder import train_encoder_command
from perennial.cli.run import run_command
from perennial.client.digests import answer_digest
from perennial.client.identity import Identity
from perennial.client.site import open_site
from perennial.config.approval import approved_experiment
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.site import SiteConfig, SitePolicy
from perennial.deploy.application import stage_application
from perennial.deploy.approval import approve, read_offer
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.models.config import EncoderConfig
from perennial.models.digest_encoders import build_encoder, digest_shape, encoder_hash
from perennial.models.encoder_file import ABOUT, as_text
from perennial.models.saved import load_saved
from perennial.protocol.messages import DigestRequest
from perennial.server.summary import hashes_of

SHAPE = (1, 8, 8)
EXPERIMENT: dict[str, Any] = {
    "name": "encoders",
    "seed": 3,
    "data": {"source": "digits", "sites": 2, "samples_limit": 80, "test_limit": 20},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05, "momentum": 0.9}},
    "strategy": {"name": "digest_synthesis", "base": "fedavg"},
    "digests": {"per_digest": 2},
    "absence": [{"site": "site-1", "first_round": 2}],
    "evaluation": {"federated": False},
}
TRAINING: dict[str, Any] = {
    "data": {"source": "digits", "samples_limit": 200},
    "epochs": 4,
    "batch_size": 16,
    "lr": 0.01,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of digits, trained once."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "encoder.safetensors")
    return folder / "encoder.safetensors"


def train(folder: Path, name: str, *overrides: str) -> list[float]:
    """Losses of the epochs."""
    (folder / "training.yaml").write_text(yaml.safe_dump(TRAINING))
    said: list[str] = []
    train_encoder_command(folder / "training.yaml", folder / name, list(overrides), said.append)
    return [float(line.rpartition(" ")[2]) for line in said]


def write(folder: Path, encoder: str | dict[str, Any], **changes: Any) -> Path:
    path = folder / "experiment.yaml"
    digests = EXPERIMENT["digests"] | {"encoder": encoder}
    path.write_text(yaml.safe_dump(EXPERIMENT | {"digests": digests} | changes))
    return path


def autoencoder(file: Path | str) -> dict[str, Any]:
    return {"name": "autoencoder", "file": str(file)}


def located(path: Path, name: str = "autoencoder") -> EncoderConfig:
    """path with its SHA-256, as an experiment file would be read."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return EncoderConfig.model_validate({"name": name, "file": str(path), "sha256": digest})


# training


def test_training_reduces_the_loss_and_gives_the_same_file_for_the_same_seed(
    trained: Path, tmp_path: Path
) -> None:
    losses = train(tmp_path, "again.safetensors")
    assert losses[-1] < 0.7 * losses[0]
    assert (tmp_path / "again.safetensors").read_bytes() == trained.read_bytes()
    train(tmp_path, "other.safetensors", "seed=2")
    assert (tmp_path / "other.safetensors").read_bytes() != trained.read_bytes()


def test_a_trained_encoder_is_non_negative_of_known_size_and_not_the_random_one(trained: Path) -> None:
    encoder = build_encoder(located(trained), SHAPE, seed=1)
    x = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))
    features = encoder(x)
    assert features.shape[1:] == digest_shape(SHAPE)
    assert features.min() == 0
    assert 0.1 < float(features.square().mean()) < 10
    assert encoder_hash(encoder) != encoder_hash(build_encoder(EncoderConfig(), SHAPE, seed=1))
    # nothing of it is drawn from the experiment's seed
    assert encoder_hash(encoder) == encoder_hash(build_encoder(located(trained), SHAPE, seed=2))
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


# what a file must be


def spoilt(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], bytes]:
    """A whole file, with its tensors changed."""

    def content(path: Path) -> bytes:
        tensors = load_file(path)
        change(tensors)
        about = json.dumps({"version": 1, "input_shape": list(SHAPE)})
        return save(tensors, {ABOUT: about})

    return content


def described(**about: Any) -> Callable[[Path], bytes]:
    return lambda path: save(load_file(path), {ABOUT: json.dumps(about)})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda path: path.read_bytes()[:-40], "not a whole safetensors file"),
        (lambda path: b"\xff" * 200, "not a whole safetensors file"),
        (lambda path: b"", "not a whole safetensors file"),
        (lambda path: save(load_file(path)), "version: found nothing, allowed 1"),
        (described(version=2, input_shape=[1, 8, 8]), "version: found 2, allowed 1"),
        (
            described(version=1, input_shape=[3, 32, 32]),
            r"input_shape: found \[3, 32, 32\], allowed \[1, 8, 8\]",
        ),
        (spoilt(lambda found: found["2.bias"].fill_(math.nan)), "tensor '2.bias': found NaN"),
        (spoilt(lambda found: found.pop("0.weight")), "tensor '0.weight': missing"),
        (spoilt(lambda found: found.update(more=torch.zeros(1))), "tensor 'more': unknown"),
        (
            spoilt(lambda found: found.update({"0.weight": torch.zeros(16, 1, 5, 5)})),
            r"tensor '0.weight': found torch.float32 \(16, 1, 5, 5\), allowed torch.float32 \(16, 1, 3, 3\)",
        ),
        (
            spoilt(lambda found: found.update({"0.bias": torch.zeros(16, dtype=torch.float64)})),
            "tensor '0.bias': found torch.float64",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    trained: Path, tmp_path: Path, content: Callable[[Path], bytes], reason: str
) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content(trained))
    experiment = load_experiment(write(tmp_path, autoencoder("bad.safetensors")))
    with pytest.raises(ConfigError, match=rf"digests.encoder.file: .*bad.safetensors: {reason}"):
        build_encoder(experiment.encoder, SHAPE, experiment.seed)


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        ("randm", "digests.encoder.name: found 'randm'"),
        ("autoencoder", "file is missing: name 'autoencoder' needs one"),
        ({"name": "random", "file": "encoder.safetensors"}, "found name 'random'"),
        ({"name": "autoencoder", "file": "none.safetensors"}, "none.safetensors: cannot be read"),
        ({"name": "autoencoder", "fil": "encoder.safetensors"}, "unknown key .*did you mean 'file'"),
    ],
)
def test_a_block_that_makes_no_sense_is_refused(
    trained: Path, tmp_path: Path, encoder: str | dict[str, Any], reason: str
) -> None:
    (tmp_path / "encoder.safetensors").write_bytes(trained.read_bytes())
    with pytest.raises(ConfigError, match=reason):
        load_experiment(write(tmp_path, encoder))


# one experiment, one encoder


def test_the_experiment_is_known_by_the_content_of_the_file_and_not_by_its_place(
    trained: Path, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere.safetensors"
    other.write_bytes(trained.read_bytes())
    one, two = (load_experiment(write(tmp_path, autoencoder(file))) for file in (trained, other))
    assert one.digest == two.digest
    assert one.digest != load_experiment(write(tmp_path, "random")).digest
    train(tmp_path, "elsewhere.safetensors", "epochs=1")
    assert load_experiment(write(tmp_path, autoencoder(other))).digest != one.digest


def test_a_site_refuses_a_request_for_an_encoder_that_it_does_not_have(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "encoder.safetensors"
    file.write_bytes(trained.read_bytes())
    experiment = load_experiment(write(tmp_path, autoencoder(file)))
    policy = SitePolicy(answers=["train", "digest"])
    site = open_site(Identity("site-1", experiment, policy, tmp_path / "state", "cpu", 1))
    request = DigestRequest(
        run="r",
        experiment=experiment.digest,
        class_order=site.process.registry.order_hash,
        task=1,
        round=1,
        num_classes=10,
        encoder=encoder_hash(build_encoder(EncoderConfig(), SHAPE, experiment.seed)),
    )
    with pytest.raises(ProtocolError, match=r"encoder: found \w+, this site has \w+"):
        answer_digest(site, request)
    train(tmp_path, "encoder.safetensors", "seed=2")
    with pytest.raises(ConfigError, match=r"found an encoder with SHA-256 \w+, the experiment has \w+"):
        answer_digest(site, request)


@pytest.mark.parametrize("name", ["random", "autoencoder", "mobilenet_v2"])
def test_a_run_with_each_encoder_has_the_same_bits_with_two_workers(
    trained: Path, tmp_path: Path, name: str
) -> None:
    path = write(tmp_path, autoencoder(trained) if name == "autoencoder" else name)
    one, two = (
        run_in_process(RunSettings(str(path), runs=str(tmp_path / f"runs-{workers}")), workers)
        for workers in (1, 2)
    )
    assert hashes_of(one) == hashes_of(two)
    assert isinstance(one["digest"], dict)
    assert one["digest"]["sites"]["site-1"]["rounds_stood_in"] == 1


def test_a_run_is_not_resumed_with_a_changed_file_and_its_model_needs_none(
    trained: Path, tmp_path: Path
) -> None:
    file = tmp_path / "encoder.safetensors"
    file.write_bytes(trained.read_bytes())
    path = write(tmp_path, autoencoder("encoder.safetensors"))
    runs = tmp_path / "runs"
    run_in_process(RunSettings(str(path), runs=str(runs)))
    folder = runs / "encoders"
    train(tmp_path, "encoder.safetensors", "seed=2")
    with pytest.raises(ConfigError, match="found an encoder with SHA-256"):
        run_command(None, [], None, "", runs, 1, "cpu", folder, None)
    with pytest.raises(StateError, match=r"in: digests.encoder.sha256"):
        run_command(path, [], None, "", runs, 1, "cpu", folder, None)
    file.unlink()
    kept = load_saved(folder / "model.safetensors").model.get_submodule("encoder")
    # the model's own copy, bit for bit
    assert torch.equal(kept.get_parameter("layers.0.weight"), load_file(trained)["0.weight"])


# torchvision


# deployment


def test_the_file_travels_in_the_app_that_sites_approve(trained: Path, tmp_path: Path) -> None:
    path = write(tmp_path, autoencoder(trained))
    staged = stage_application(path, [], "", tmp_path / "apps")
    home = tmp_path / "flower"
    approvals = tmp_path / "approvals"
    approve(read_offer(staged.fab, SiteConfig(site="graz", state_dir=tmp_path)), home, approvals)
    here = load_experiment(path)
    there = approved_experiment(RunSettings(digest=here.digest), approvals, {})
    (kept,) = approvals.glob("*/encoder.json")
    assert there.encoder.file == str(kept) and there.digest == here.digest
    ours, theirs = (build_encoder(found.encoder, SHAPE, found.seed) for found in (here, there))
    assert encoder_hash(ours) == encoder_hash(theirs)
    train(tmp_path, "other.safetensors", "epochs=1")
    other = stage_application(
        write(tmp_path, autoencoder("other.safetensors")), [], "other", tmp_path / "apps"
    )
    assert other.digest != staged.digest
    spoilt_text = tmp_path / "text.json"
    spoilt_text.write_bytes(as_text(b"nothing")[:-3])
    with pytest.raises(ConfigError, match="text.json: not a file that"):
        load_experiment(write(tmp_path, autoencoder(spoilt_text)))

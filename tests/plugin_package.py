"""A package of somebody else, with one method of each kind, as a test installs it."""

from pathlib import Path

MODULE = "median_plugin"
CODE = '''"""Methods of one's own."""

import torch
from perennial import Aggregator, IncrementalStrategy, Loss, Samples, Source


class Median(IncrementalStrategy):
    """The median of the sites' updates, times `step`."""

    def __init__(self, step: float = 1.0) -> None:
        super().__init__()
        if step <= 0:
            raise ValueError(f"step: found {step}, allowed above 0")
        self.step = step

    def aggregator(self, ctx):
        return Middle(ctx, self.step)


class Middle(Aggregator):
    """Keeps every update of the round."""

    def __init__(self, ctx, step):
        super().__init__(ctx)
        self.step, self.updates = step, {}

    def add(self, reply) -> None:
        self.updates[reply.site] = reply.update

    def result(self):
        rows = [update for _, update in sorted(self.updates.items())]
        return {
            name: tensor + self.step * torch.stack([row[name] for row in rows]).median(dim=0).values
            for name, tensor in self.ctx.reference.items()
        }


class Focal(Loss):
    """Cross entropy in which easy samples count less (Lin et al. 2017)."""

    alone = True

    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def __call__(self, batch):
        each = torch.nn.functional.cross_entropy(batch.logits, batch.labels, reduction="none")
        return (1 - (-each).exp()) ** self.gamma * each


class Wide(torch.nn.Module):
    """One hidden layer."""

    def __init__(self, input_shape, features: int = 24) -> None:
        super().__init__()
        self.width = features
        self.layer = torch.nn.Linear(torch.Size(input_shape).numel(), features)

    def forward(self, x):
        return self.layer(x.flatten(1)).relu()


def blobs(config, seed, spread: float = 0.3):
    """Four classes around four points."""
    labels = torch.arange(400) % 4
    noise = torch.randn(400, 6, generator=torch.Generator().manual_seed(seed))
    samples = Samples(torch.eye(4, 6)[labels] + spread * noise, labels)
    nothing = torch.full((6,), float("nan"))
    return Source(samples, None, ("a", "b", "c", "d"), nothing, nothing)
'''
ENTRY_POINTS = f"""[perennial.strategies]
stepped_median = {MODULE}:Median

[perennial.losses]
focal = {MODULE}:Focal

[perennial.models]
wide = {MODULE}:Wide

[perennial.sources]
blobs = {MODULE}:blobs
"""
PROJECT = f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "median-plugin"
version = "0.3.0"

[project.entry-points."perennial.strategies"]
stepped_median = "{MODULE}:Median"

[tool.setuptools]
packages = ["{MODULE}"]
"""
EXPERIMENT = {
    "name": "plugged",
    "seed": 3,
    "data": {"source": "blobs", "sites": 3, "options": {"spread": 0.4}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "wide", "options": {"features": 16}},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.2},
        "classification": {"name": "focal", "options": {"gamma": 1.0}},
    },
    "strategy": {"name": "stepped_median", "step": 0.9},
}


def write_sources(folder: Path) -> Path:
    """The package's folder, to be built."""
    (folder / MODULE).mkdir(parents=True)
    (folder / MODULE / "__init__.py").write_text(CODE)
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def install(folder: Path) -> Path:
    """The package as an installer leaves it in a folder of the import path."""
    (folder / MODULE).mkdir(parents=True)
    (folder / MODULE / "__init__.py").write_text(CODE)
    facts = folder / "median_plugin-0.3.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: median-plugin\nVersion: 0.3.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder

"""The hospital that the attacks of `hostile_server` meet: a real ClientApp with a site.yaml and one policy.

It is taken to have approved the experiment that an attack needs, which is the worst case: then its policy
alone stands in the way.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml
from flwr.app import Context, Message, RecordDict
from torch import Tensor

from perennial.client import request_count
from perennial.client import site as site_module
from perennial.client.app import app as client_app
from perennial.client.identity import Identity
from perennial.client.site import Site, open_site
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.site import load_site_config
from perennial.engine.grid import set_task_identity
from perennial.models.factory import build_model
from perennial.models.incremental import select_travelling
from perennial.protocol.fields import WireMessage, read_kind
from perennial.protocol.messages import (
    CompareHeadsReply,
    DigestReply,
    EvaluateReply,
    FinishTaskReply,
    PersonalModelReply,
    Refusal,
    SparsityReply,
    StatisticsReply,
    TrainReply,
)
from perennial.protocol.stamp import Stamp
from tests.approved import approve_installed

ROOT = Path(__file__).resolve().parents[2]
SITE, RUN = "site-1", "0123456789abcdef"
PIXELS = 64
"""Of an image."""
BASE: dict[str, Any] = {
    "name": "hostile",
    "seed": 5,
    "data": {"source": "digits", "sites": 3, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [PIXELS]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.01}, "batch_size": 512},
}

COLUMNS = {"age": "numeric", "pressure": "numeric"}
TABLE: dict[str, Any] = {
    "source": "csv",
    "columns": COLUMNS,
    "classes": ["ill", "well"],
    "normalise": {"mean": dict.fromkeys(COLUMNS, 0.0), "std": dict.fromkeys(COLUMNS, 1.0)},
    "test_fraction": 0,
    "validation_fraction": 0,
    "sites": 2,
}
"""`data` of a hospital whose records an attack chooses; write_table() writes them."""
SUMS: dict[str, Any] = {
    "model": {"name": "features", "features": [{"name": "random", "width": 12}]},
    "tasks": {"count": 1, "rounds": 1},
    "learner": None,
    "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.01},
    "privacy": {"mode": "sample", "release": "sums", "noise_multiplier": 4.0},
    "evaluation": {"federated": True, "noise_multiplier": 8.0},
}
"""Blocks of an experiment that releases sums of features under noise, and counts."""


def rows(count: int = 40, label: str = "") -> list[list[str]]:
    """Rows of TABLE, of one label or of both by turns."""
    draw = np.random.default_rng(0)
    return [
        [f"{draw.normal():.6f}", f"{draw.normal():.6f}", label or ("ill" if place % 2 else "well")]
        for place in range(count)
    ]


def write_table(folder: Path, table: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Write visits.csv, which no process has read yet; returns a site's `data` block for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "visits.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*COLUMNS, "label"], *table])
    site_module._processes.clear()  # pyright: ignore[reportPrivateUsage]
    return {"source": "csv", "path": str(folder / "visits.csv")}


def template_policy() -> dict[str, Any]:
    """What deploy/site/site.yaml ships."""
    text = (ROOT / "deploy" / "site" / "site.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text.replace("@{superlink}", "host:9092"))["policy"]


class Hospital:
    """One site with a site.yaml, and the way for a server to ask it. What it approved is `experiment`.

    policy: of its site.yaml; `max_repeats` here takes the place of REPEATS.
    changes: blocks of BASE that are other ones; None leaves a block out. own: a data block of the site's own.
    """

    def __init__(
        self,
        folder: Path,
        policy: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.site_file = folder / "experiment.yaml", folder / "site.yaml"
        settings = {key: value for key, value in (BASE | changes).items() if value is not None}
        self.file.write_text(yaml.safe_dump(settings))
        rules = {key: value for key, value in policy.items() if key != "max_repeats"}
        content = {"site": SITE, "state_dir": "state", "device": "cpu", "policy": rules}
        if own is not None:
            content["data"] = dict(own)
        self.site_file.write_text(yaml.safe_dump(content))
        self.experiment: Experiment = load_experiment(self.file)
        self.config = load_site_config(self.site_file)
        approve_installed(self.file, self.config.approvals)
        self.refusal = ""
        self._repeats = policy.get("max_repeats", request_count.REPEATS)

    def ask(self, request: WireMessage, **run_config: str) -> WireMessage | None:
        """What the ClientApp answers; None for a refusal, whose reason is then in `refusal`."""
        set_task_identity()
        settings = {"experiment": str(self.file), "digest": self.experiment.digest, **run_config}
        context = Context(1, 1, {"site": str(self.site_file)}, RecordDict(), dict(settings))
        message = Message(request.to_record(), 1, request.message_type)
        with mock.patch.object(request_count, "REPEATS", self._repeats):
            content = client_app(message, context).content
        if read_kind(content) == Refusal.__name__:
            refusal = Refusal.from_record(content)
            self.refusal = self.refusal or f"{refusal.kind}: {refusal.reason}"
            return None
        replies = (
            TrainReply,
            EvaluateReply,
            FinishTaskReply,
            DigestReply,
            StatisticsReply,
            CompareHeadsReply,
            SparsityReply,
            PersonalModelReply,
        )
        (kind,) = [reply for reply in replies if reply.__name__ == read_kind(content)]
        return kind.from_record(content)

    @property
    def site(self) -> Site:
        """The site itself, to score an attack with; no attack reads it."""
        return open_site(Identity.of_site(self.config, self.experiment))

    def images(self, part: str = "train") -> Tensor:
        """(n, 64) of task 1."""
        data = self.site.data
        classes = self.site.process.registry.schedule.list_classes(1)
        return data.x[data.find_task_indices(part, 0, classes.stop)].flatten(1).double()  # pyright: ignore[reportArgumentType]

    def stamp(self, number: int = 1) -> dict[str, Any]:
        registry = self.site.process.registry
        return Stamp(
            run=RUN,
            experiment=self.experiment.digest,
            class_order=registry.order_hash,
            task=1,
            round=number,
            num_classes=registry.schedule.num_classes(1),
        ).stamp_fields

    def arrays(self) -> dict[str, Tensor]:
        """A model of the right shapes, for the server to fill as it likes."""
        shape, classes = self.site.data.input_shape, self.stamp()["num_classes"]
        model = build_model(self.experiment.model, shape, classes, self.experiment.seed)
        return {name: tensor.clone() for name, tensor in select_travelling(model).items()}


EVERYTHING = ["train", "evaluate", "digest", "sparsity"]
POLICIES: dict[str, dict[str, Any]] = {
    "open": {"answers": EVERYTHING, "max_evaluations": 10**6, "max_repeats": 10**6},
    "defaults": {"answers": EVERYTHING},
    "floor of 20": {"answers": EVERYTHING, "min_samples": 20},
    "template": template_policy(),
}

"""A deployed site in this process, which answers messages as one on the network does.

The ClientApp is the real one, with a site.yaml, an approved experiment and a state_dir; only the way that
messages take is short.
"""

from pathlib import Path
from typing import Any

import torch
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.simulation import load_simulated_federation
from perennial.config.site import load_site_config
from perennial.data.schedule import Registry
from perennial.engine.grid import set_task_identity
from perennial.models.factory import build_model
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import (
    ClassCountsRequest,
    CompareHeadsRequest,
    DescribeRequest,
    DigestRequest,
    EvaluateRequest,
    FinishTaskRequest,
    PersonalModelRequest,
    Refusal,
    SparsityRequest,
    StatisticsRequest,
    TrainRequest,
)
from perennial.protocol.secure_messages import IntroduceRequest, OpenRequest, ShareRequest, VoteRequest
from perennial.protocol.stamp import VERSION, Stamp
from perennial.protocol.tensors import Tensors, hash_tensors
from tests.approved import approve_installed

EXPERIMENT: dict[str, Any] = {
    "name": "attacked",
    "data": {"source": "digits", "sites": 2, "samples_limit": 120},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.1},
        "memory": {"per_class": 2},
        "distillation": {"weight": 1.0},
    },
}
RUN = "0123456789abcdef"
NODE = 7


def _of_masked_sums(stamp: dict[str, Any], rest: dict[str, Any]) -> list[Stamp | DescribeRequest]:
    """The exchanges of one attempt, as far as one site can be asked without the others: keys of nobody."""
    names, key, signature = ["site-0", "site-1"], ["0" * 64] * 2, ["0" * 128] * 2
    roster: dict[str, Any] = {"attempt": 1, "roster": names, "roster_masks": key, "roster_commitments": key}
    roster |= {"roster_signatures": signature}
    peers: dict[str, Any] = {"peers": names, "peer_identities": key, "peer_ciphers": key}
    found: list[Stamp | DescribeRequest] = [
        IntroduceRequest(**stamp),
        ShareRequest(**stamp, attempt=1, **peers, peer_signatures=signature),
        VoteRequest(**stamp, attempt=1, survivors=names, senders=names, shares=["00" * 94] * 2),
        OpenRequest(**stamp, attempt=1, survivors=names, voters=names, votes=signature),
    ]
    return found + [kind(**stamp, **rest, **roster) for kind in (TrainRequest, EvaluateRequest)]


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    """EXPERIMENT with changes; a block of None is left out."""
    return {key: value for key, value in {**EXPERIMENT, **changes}.items() if value is not None}


class DeployedSite:
    """One site and the messages that it is sent. file: its site.yaml."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: dict[str, Any] | None = None,
        state: dict[str, Any] | None = None,
        experiment: dict[str, Any] | None = None,
    ) -> None:
        set_task_identity()
        path, self.file = folder / "experiment.yaml", folder / "site.yaml"
        path.write_text(yaml.safe_dump(merged(experiment or {})))
        settings = {"site": "site-0", "state_dir": "state", "policy": policy or {}, "state": state or {}}
        self.file.write_text(yaml.safe_dump(settings))
        self.state_dir = folder / "state"
        approve_installed(path, load_site_config(self.file).approvals)
        self.experiment: Experiment = load_experiment(path)
        federation = load_simulated_federation(self.experiment)
        self.registry: Registry = federation.registry
        self._shape = federation.input_shape
        run_config: Any = {"digest": self.experiment.digest}
        node_config: Any = {"site": str(self.file)}
        self._context = Context(1, NODE, node_config, RecordDict(), run_config)

    def model(self, task: int) -> dict[str, Any]:
        """The complete tensors of a fresh model, as it could be at the end of a task."""
        return {name: tensor.detach().clone() for name, tensor in complete_state(self._built(task)).items()}

    def arrays(self, task: int) -> Tensors:
        """The tensors of a fresh model that travel in a task."""
        flat = FlatParameters(self._built(task))
        return Tensors({name: tensor.clone() for name, tensor in flat.view_tensors(flat.vector).items()})

    def _built(self, task: int) -> IncrementalModel:
        classes = self.registry.schedule.num_classes(task)
        experiment = self.experiment
        return build_model(experiment.model, self._shape, classes, experiment.seed)

    def stamp(self, number: int, run: str = RUN) -> dict[str, Any]:
        """The stamp of a round, as the approved experiment has it; a round is a task here."""
        return {
            "run": run,
            "experiment": self.experiment.digest,
            "class_order": self.registry.order_hash,
            "task": number,
            "round": number,
            "num_classes": self.registry.schedule.num_classes(number),
        }

    def request(
        self,
        kind: type[TrainRequest] | type[FinishTaskRequest],
        number: int,
        run: str = RUN,
        previous_model: dict[str, Any] | None = None,
    ) -> TrainRequest | FinishTaskRequest:
        """A request of a round as an honest server makes it, with any model as that of the task before."""
        previous = "" if previous_model is None else hash_tensors(previous_model)
        before = None if previous_model is None else Tensors(previous_model)
        stamp = self.stamp(number, run)
        return kind(**stamp, arrays=self.arrays(number), previous=previous, previous_arrays=before)

    def every_request(self) -> list[Stamp | DescribeRequest]:
        """One of each kind for each round, as an honest server makes them."""
        found: list[Stamp | DescribeRequest] = [
            DescribeRequest(version=VERSION, experiment=self.experiment.digest)
        ]
        before = self.model(1)
        for number in (1, 2):
            stamp, arrays = self.stamp(number), self.arrays(number)
            previous: dict[str, Any] = {
                "previous": hash_tensors(before),
                "previous_arrays": Tensors(before),
            }
            rest: dict[str, Any] = {"arrays": arrays} | (previous if number == 2 else {})
            found += [kind(**stamp, **rest) for kind in (TrainRequest, FinishTaskRequest, EvaluateRequest)]
            found.append(PersonalModelRequest(**stamp, **rest, personal=["head.weight"]))
            found.append(DigestRequest(**stamp, encoder="0" * 64))
            found.append(SparsityRequest(**stamp, **rest))
            found += self._of_statistics(stamp)
            found += _of_masked_sums(stamp, rest)
        return found

    def _of_statistics(self, stamp: dict[str, Any]) -> list[Stamp | DescribeRequest]:
        backbone, known = self._built(1).backbone, stamp["num_classes"]
        fixed = isinstance(backbone, FixedFeatures)
        features, width = (backbone.content, backbone.width) if fixed else ("0" * 64, 3)
        heads = Tensors(weight=torch.zeros(2, known, width), bias=torch.zeros(2, known))
        return [
            StatisticsRequest(**stamp, of_task=1, features=features),
            ClassCountsRequest(**stamp, of_task=1),
            CompareHeadsRequest(**stamp, features=features, heads=heads),
        ]

    @staticmethod
    def outcome(answer: RecordDict) -> str:
        """What an answer is, in a word. foreign: refused as another app's message."""
        if not answer:
            return "refused: foreign"
        return "refused" if read_kind(answer) == "Refusal" else "answered"

    def send(self, record: RecordDict, message_type: str) -> RecordDict:
        """The site's answer to any record; empty when that is an error of Flower's."""
        message = Message(record, NODE, message_type)
        message.metadata.__dict__["_message_id"] = "1"
        answer = app(message, self._context)
        return answer.content if answer.has_content() else RecordDict()

    def ask(self, request: TrainRequest | FinishTaskRequest) -> Refusal | None:
        """None for an answer, or the refusal."""
        answer = self.send(request.to_record(), request.message_type)
        return Refusal.from_record(answer) if read_kind(answer) == "Refusal" else None

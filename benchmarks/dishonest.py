"""Sites that attack: for the tables of robustness, and never in the product.

An attack wraps the ClientApp of simulated sites. The dishonest ones are the last sites, so that in the
in-process engine they answer after the honest ones, whose updates of the round they know: the strongest
adversary of the literature. Written as `NAME`, or `NAME:KEY=VALUE,...` with `sites` for how many collude.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from torch import Tensor

from benchmarks.adaptive import GOALS, TARGET, AdaptiveClient, backdoored, triggered, update_of
from perennial.client.site import Site
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import list_simulated_sites, load_simulated_federation
from perennial.engine.grid import InProcessGrid, build_site_contexts, set_task_identity
from perennial.engine.run import answer
from perennial.foundation.errors import StateError
from perennial.foundation.streams import stream, torch_seed
from perennial.learning.batches import TrainingSet
from perennial.models.saved import GLOBAL_MODEL, load_saved
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import MAX_EXAMPLES
from perennial.protocol.tensors import Tensors
from perennial.server.app import serve

SOURCE = 1
"""The class, by label, that a one-class flip calls TARGET."""
ABSENT = "absent"
"""No attack: the dishonest sites never answer, so that the honest ones train alone."""

Update = dict[str, Tensor]


@dataclass(frozen=True)
class Attack:
    """What the dishonest sites of a run do.

    name: of the attack.
    sites: how many sites are dishonest.
    boost: factor on what they send.
    samples: what they claim to have; 0: the truth.
    z: least standard deviations of "a little is enough".
    quiet: rounds out of ten, from the first, in which they behave.
    """

    name: str
    sites: int = 1
    boost: float = 1.0
    samples: int = 0
    z: float = 0.3
    quiet: int = 0

    @classmethod
    def parsed(cls, text: str) -> "Attack":
        """From NAME:KEY=VALUE,... Raises ValueError for a name or key that there is not."""
        name, _, rest = text.partition(":")
        if name not in (known := (*DATA, *UPDATES, *GOALS, ABSENT)):
            raise ValueError(f"attack: found {name!r}, allowed {', '.join(known)}")
        values: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            values[key] = float(value) if key in ("boost", "z") else int(float(value))
        return cls(name, **values)


def flipped(data: TrainingSet, classes: int) -> TrainingSet:
    """Every label c called classes - 1 - c."""
    return replace(data, y=classes - 1 - data.y)


def one_flipped(data: TrainingSet, classes: int) -> TrainingSet:
    """Samples of class SOURCE called TARGET."""
    return replace(data, y=torch.where(data.y == SOURCE, TARGET, data.y))


def unchanged(own: Update, honest: list[Update], sites: int, generator: np.random.Generator) -> Update:
    return own


def turned_round(own: Update, honest: list[Update], sites: int, generator: np.random.Generator) -> Update:
    return {name: -tensor for name, tensor in own.items()}


def random_direction(own: Update, honest: list[Update], sites: int, generator: np.random.Generator) -> Update:
    """Noise of the honest update's norm."""
    draws = torch.Generator().manual_seed(torch_seed(generator))
    noise = {name: torch.randn(tensor.shape, generator=draws) for name, tensor in own.items()}
    factor = _norm(own) / max(_norm(noise), 1e-30)
    return {name: tensor * factor for name, tensor in noise.items()}


def a_little(
    own: Update, honest: list[Update], sites: int, generator: np.random.Generator, z: float = 0.3
) -> Update:
    """Mean minus standard deviations of the honest updates.

    How many follows from the number of honest sites that must be outdone for a majority, and is z at least:
    with one of five it would be 0, which harms nobody.

    Baruch et al. 2019 (arXiv 1902.06156).
    """
    n = len(honest) + sites
    supporters = n // 2 + 1 - sites
    share = (n - sites - supporters) / max(n - sites, 1)
    most = max(NormalDist().inv_cdf(min(max(share, 0.5), 0.99)), z)
    stacked = {name: torch.stack([update[name] for update in honest]) for name in own}
    return {name: rows.mean(dim=0) - most * rows.std(dim=0) for name, rows in stacked.items()}


def inner_product(own: Update, honest: list[Update], sites: int, generator: np.random.Generator) -> Update:
    """Minus twice the mean of the honest updates.

    The mean of all sites' updates turns round from a boost of (honest sites) / (2 x dishonest ones) on; a
    minority without one slows the model down and does no more.

    Xie et al. 2020 (arXiv 1903.03936).
    """
    return {name: -2.0 * torch.stack([u[name] for u in honest]).mean(dim=0) for name in own}


def nothing(own: Update, honest: list[Update], sites: int, generator: np.random.Generator) -> Update:
    return {name: torch.zeros_like(tensor) for name, tensor in own.items()}


DATA: dict[str, Callable[[TrainingSet, int], TrainingSet]] = {
    "label_flip": flipped,
    "one_class_flip": one_flipped,
    "backdoor": backdoored,
}
"""Attacks on the samples that a site trains on."""
A_LITTLE = "a_little"
UPDATES: dict[str, Callable[[Update, list[Update], int, np.random.Generator], Update]] = {
    "scaling": unchanged,
    "sign_flip": turned_round,
    "random": random_direction,
    A_LITTLE: a_little,
    "inner_product": inner_product,
    "free_rider": nothing,
}
"""Attacks on the update that a site sends."""


@dataclass
class DishonestClient:
    """The ClientApp of all sites of a run, the last `attack.sites` of which attack."""

    attack: Attack
    sites: int
    seed: int
    _honest: dict[int, list[Update]] = field(default_factory=dict)

    def __call__(self, message: Message, context: Context) -> Message:
        partition = int(str(context.node_config["partition-id"]))
        if message.metadata.message_type != "train":
            return answer(message, context)
        if partition < self.sites - self.attack.sites:
            reply = answer(message, context)
            if content := update_of(reply):
                self._honest = {content.round: [*self._honest.get(content.round, []), dict(content.update)]}
            return reply
        if self.attack.name == ABSENT:
            return Message(Error(0, "absent"), reply_to=message)
        request = TrainRequest.from_record(message.content)
        if (request.round - 1) % 10 < self.attack.quiet:
            return answer(message, context)
        poison = DATA.get(self.attack.name)
        with _poisoned(poison) if poison else _as_it_is():
            reply = answer(message, context)
        content = update_of(reply)
        if content is None:
            return reply
        change = UPDATES.get(self.attack.name, unchanged)
        if self.attack.name == A_LITTLE:
            change = partial(a_little, z=self.attack.z)
        generator = stream(self.seed, "attack", content.round, partition)
        honest = self._honest.get(content.round) or [dict(content.update)]
        update = change(dict(content.update), honest, self.attack.sites, generator)
        boosted = Tensors({name: tensor * self.attack.boost for name, tensor in update.items()})
        lie = replace(content, update=boosted)
        if self.attack.samples:
            lie = replace(lie, num_examples=min(self.attack.samples, MAX_EXAMPLES))
        return Message(lie.to_record(), reply_to=message)


def attacked_run(settings: RunSettings, attack: str) -> dict[str, Any]:
    """Run once in process under an attack; the summary has `attack_success` and `moved_to_target` as well.

    They are success() without and with `moved`.

    attack: "" for none.
    """
    set_task_identity()
    experiment = settings.load()
    run_config = dict(vars(settings))
    sites = len(list_simulated_sites(experiment))
    chosen = Attack.parsed(attack) if attack else None
    if chosen is None:
        client = answer
    elif chosen.name in GOALS:
        client = AdaptiveClient(experiment, sites, chosen.sites, chosen.name)
    else:
        client = DishonestClient(chosen, sites, experiment.seed)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    try:
        summary = dict(
            serve(InProcessGrid(client, build_site_contexts(sites, run_config)), context, "in-process")
        )
    except StateError:
        # no update was finite any more: the model is lost
        chance = 1 / len(load_simulated_federation(experiment).classes)
        return {
            "final_accuracy": chance,
            "balanced_accuracy": [chance],
            "attack_success": None,
            "moved_to_target": None,
            "seconds": 0.0,
            "model_sha256": "",
        }
    found = sorted(Path(settings.runs).glob(f"*/{GLOBAL_MODEL}"))
    name = chosen.name if chosen else "backdoor"
    summary["attack_success"] = success(found[0], experiment, name)
    summary["moved_to_target"] = success(found[0], experiment, name, moved=True)
    return summary


def success(path: Path, experiment: Experiment, attack: str, moved: bool = False) -> float | None:
    """Share of the test samples that the attack wants to be TARGET and that are; None for other attacks.

    moved: of a backdoor, count only samples that the model does not call TARGET without the trigger.
    """
    if attack not in ("backdoor", "adaptive_backdoor", "one_class_flip"):
        return None
    saved, data = load_saved(path), load_simulated_federation(experiment).test
    if data is None:
        return None
    x, y = data.x[data.test], data.y[data.test]

    def called_target(images: Tensor) -> Tensor:
        inputs = TrainingSet(images, torch.zeros(len(images), dtype=torch.int64), data.mean, data.std)
        with torch.no_grad():
            return saved.classifier(inputs.floats(images)).argmax(dim=1) == TARGET

    if attack == "one_class_flip":
        return float(called_target(x[y == SOURCE]).double().mean())
    other = x[y != TARGET]
    if moved:
        other = other[~called_target(other)]
    return float(called_target(triggered(other)).double().mean()) if len(other) else None


@contextmanager
def _poisoned(change: Callable[[TrainingSet, int], TrainingSet]) -> Iterator[None]:
    """Inside, a site trains on other samples than it holds."""
    honest = Site.samples

    def samples(self: Site, indices: Tensor, exemplars: int = 0, hidden: bool = False) -> TrainingSet:
        data = honest(self, indices, exemplars, hidden)
        return change(data, int(data.y.max()) + 1)

    Site.samples = samples
    try:
        yield
    finally:
        Site.samples = honest


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _norm(update: Update) -> float:
    return float(torch.cat([tensor.reshape(-1) for tensor in update.values()]).norm())

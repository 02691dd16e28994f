"""Layer attention: in every layer a site counts by how far it moved from the server's model.

Hu et al. 2022 (Appl. Sci. 12(19):10025), equations 7 to 11, after FedAtt (Ji et al. 2019, arXiv 1812.07108).
With d_k = ||update_k of the layer||_2 and weights att = softmax_k(sign * d_k) the layer becomes
theta + alpha * sum_k att_k update_k. As printed (sign 1) the site that moved most counts most, so that one
diverged or poisoned site takes over; sign -1 trusts the near instead. See docs/methods/incre_fl.md.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from perennial.foundation.errors import ConfigError
from perennial.models.sum_grid import SumGrid
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext, RoundOutcome
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.request import Arrays, TaskStart
from perennial.strategies.sums.exact_loops import deal, run_on_threads
from perennial.strategies.sums.exact_sum import ExactSum
from perennial.strategies.sums.update_file import UpdateFile

DOMINANT = 0.9
"""A weight above this among more than two sites is worth a warning."""
HEAD = "head."
WORTH_THREADS = 1 << 22
"""Values in a model from which handing work to threads pays."""
T = TypeVar("T")


class LayerAttention(IncrementalStrategy):
    """One pass in flat memory for the literal rule; two, with updates on disk, where a mean comes first.

    alpha: step towards the weighted mean, 0 to 2. sign: 1 favours the far, -1 the near.
    scale: "mean" divides each layer's distances by their mean over the sites first, because a norm grows with
    the square root of the tensor's size. head_query: distances of the head from the server's own grown head,
    or as printed from the sites' mean.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        sign: Literal[1, -1] = 1,
        scale: Literal["none", "mean"] = "none",
        head_query: Literal["grown", "client_mean"] = "grown",
        **flower: Any,
    ) -> None:
        if not 0 <= alpha <= 2:
            raise ValueError(f"alpha: found {alpha}, allowed 0 to 2")
        super().__init__(**flower)
        self.alpha, self.sign = alpha, sign
        self.scale, self.head_query = scale, head_query
        self._rounds = 0
        self._totals: dict[str, dict[str, float]] = {}
        self._told = False

    def check_layers(self, arrays: Arrays) -> None:
        if self.head_query == "client_mean" and not _select_heads(arrays):
            raise ConfigError(
                "strategy.head_query: found client_mean, but no shared tensor's name starts with "
                f"{HEAD!r}; allowed: grown"
            )

    def begin_task(self, task: TaskStart) -> None:
        self.check_layers(task.reference)

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return AttendedLayers(ctx, self)

    def summary_blocks(self) -> dict[str, Any]:
        """The block on attention in summary.json.

        attention: layer -> site -> weight, mean over the rounds so far; an absent site counts as 0.
        """
        if not self._rounds:
            return {}
        return {
            "attention": {
                layer: {site: total / self._rounds for site, total in sorted(row.items())}
                for layer, row in self._totals.items()
            }
        }

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds, "totals": self._totals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rounds, self._totals = state["rounds"], state["totals"]

    def report(self, outcome: RoundOutcome, weights: dict[str, dict[str, float]]) -> None:
        """Note the weights for journal and summary, with a warning if one site decides layers alone."""
        self._rounds += 1
        for layer, row in weights.items():
            totals = self._totals.setdefault(layer, {})
            for site, weight in row.items():
                totals[site] = totals.get(site, 0.0) + weight
        outcome.details["attention"] = {
            layer: {
                "largest": max(row.values()),
                "entropy": -math.fsum(weight * math.log(weight) for weight in row.values() if weight),
                "weights": row,
            }
            for layer, row in weights.items()
        }
        outcome.warnings += describe_dominance(weights)
        if self.alpha > 1.5 and not self._told:
            self._told = True
            outcome.warnings.append(
                f"layer_attention.alpha is {self.alpha}: steps beyond the sites' mean can diverge above 1.5"
            )


class AttendedLayers(Aggregator):
    """A softmax sum for each layer; if scores need a mean first, updates wait on disk for a second pass."""

    def __init__(self, ctx: RoundContext, method: LayerAttention) -> None:
        super().__init__(ctx)
        self._method, self._reference = method, ctx.reference
        self._layers = {name: {name: tensor} for name, tensor in self._reference.items()}
        size = sum(tensor.numel() for tensor in self._reference.values())
        grid = self.ctx.sum_grid(LARGEST)
        self._sums = {layer: SoftmaxSum(like, grid, size) for layer, like in self._layers.items()}
        sizes = {
            layer: sum(tensor.numel() for tensor in like.values()) for layer, like in self._layers.items()
        }
        self._groups = group_layers(sizes)
        self._distances: dict[str, dict[str, float]] = {layer: {} for layer in self._layers}
        self._norms: dict[str, float] = {}
        self._grid = grid
        self._head_mean = ExactSum({}, grid)
        heads = _select_heads(self._layers)
        self._from_mean = set(heads if self._method.head_query == "client_mean" else ())
        scaled = self._method.scale == "mean"
        self._late = [layer for layer in self._layers if scaled or layer in self._from_mean]
        late = {name: tensor for layer in self._late for name, tensor in self._layers[layer].items()}
        self._waiting = UpdateFile(late) if late else None
        if self._method.head_query == "client_mean":
            self._method.check_layers(self._reference)
            self._head_mean = ExactSum(
                {n: t for layer in heads for n, t in self._layers[layer].items()}, grid
            )

    def add(self, reply: Admitted) -> None:
        site = reply.site
        distances = of_each(self._groups, lambda layer: _compute_norm(reply.update, self._layers[layer]))
        far = [layer for layer, distance in distances.items() if not math.isfinite(distance)]
        if far:
            raise Rejected(f"layer {far[0]!r}: its distance from the server's model is not finite")
        # asked once, for the largest weight of all: an update is in the sums of all layers or of none
        if not self._grid.holds(LARGEST, reply.norm):
            raise Rejected(f"update: norm {reply.norm:.3g} does not fit the sum over the sites")
        self._norms[site] = reply.norm
        for layer, distance in distances.items():
            self._distances[layer][site] = distance

        def add(layer: str) -> None:
            if layer not in self._late:
                score = self._method.sign * distances[layer]
                self._sums[layer].add(site, reply.update, score, reply.norm)

        of_each(self._groups, add)
        if self._from_mean:
            self._head_mean.add(reply.update, 1.0, reply.norm)
        if self._waiting is not None:
            self._waiting.add(site, reply.update)

    def result(self) -> dict[str, Tensor]:
        means = self._run_second_pass()

        def step_layer(layer: str) -> Arrays:
            new = {}
            for name, weighted in self._sums[layer].value().items():
                step = weighted.mul_(self._method.alpha)
                if layer in self._from_mean:
                    step.add_(means[name], alpha=1 - self._method.alpha)
                tensor = self._reference[name]
                new[name] = step.add_(tensor).to(tensor.dtype)
            return new

        moved = of_each(self._groups, step_layer)
        new = {name: tensor for layer in moved.values() for name, tensor in layer.items()}
        self._method.report(
            self.ctx.outcome, {layer: total.compute_weights() for layer, total in self._sums.items()}
        )
        return {name: new[name] for name in self._reference}

    def _run_second_pass(self) -> Arrays:
        """Fold the layers whose weights need a mean over all sites first; returns the mean head update."""
        means: dict[str, Tensor] = {}
        if self._waiting is None:
            return means
        if self._from_mean:
            means = {name: t.div_(len(self._head_mean)) for name, t in self._head_mean.value().items()}
            for site, update in self._waiting:
                for layer in self._from_mean:
                    like = self._layers[layer]
                    difference = {name: update[name].double() - means[name] for name in like}
                    self._distances[layer][site] = _compute_norm(difference, like)
        for layer in self._late if self._method.scale == "mean" else ():
            row = self._distances[layer]
            mean = math.fsum(row.values()) / len(row)
            self._distances[layer] = {site: d / mean if mean else 0.0 for site, d in row.items()}
        for site, update in self._waiting:

            def add(layer: str, site: str = site, update: Arrays = update) -> None:
                if layer in self._late:
                    score = self._method.sign * self._distances[layer][site]
                    self._sums[layer].add(site, update, score, self._norms[site])

            of_each(self._groups, add)
        self._waiting = None
        return means


def group_layers(sizes: Mapping[str, int]) -> list[list[str]]:
    """Layers divided among threads by number of values; in one group, in order, if the model is small."""
    if sum(sizes.values()) < WORTH_THREADS:
        return [list(sizes)]
    return deal(sizes, lambda layer: sizes[layer])


def of_each(dealt: list[list[str]], work: Callable[[str], T]) -> dict[str, T]:
    """layer -> work(layer), one thread for each group. Raises what work raised first."""
    results: dict[str, T] = {}
    for part in run_on_threads("layers", lambda group: {layer: work(layer) for layer in group}, dealt):
        results |= part
    return results


def _select_heads(layers: Iterable[str]) -> list[str]:
    return [layer for layer in layers if layer.startswith(HEAD) or layer == HEAD.rstrip(".")]


def describe_dominance(weights: dict[str, dict[str, float]]) -> list[str]:
    """A sentence for each site that decides some layer alone; [] with two sites, where it is usual."""
    sentences = []
    for site in sorted({site for row in weights.values() for site in row}):
        rows = {layer: row[site] for layer, row in weights.items() if site in row and len(row) > 2}
        over = {layer: weight for layer, weight in rows.items() if weight > DOMINANT}
        if over:
            worst = max(over, key=lambda layer: over[layer])
            sentences.append(
                f"attention: site {site} has more than {DOMINANT:.0%} of the weight in {len(over)} of "
                f"{len(rows)} layers ({over[worst]:.4f} in {worst}); its update may be poisoned or diverged: "
                "see scale and sign"
            )
    return sentences


def _compute_norm(update: Arrays, like: Arrays) -> float:
    """L2 norm of the flattened layer."""
    norms = [torch.linalg.vector_norm(update[name]) for name in like]
    return float(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))


BAND_BITS = 8
KEPT_BANDS = 5
"""A weight below 2^-32 of the largest counts as none: it could not change a float32 number."""
LARGEST = 2.0**BAND_BITS
"""Weight that an update may have inside its band at most."""


class SoftmaxSum:
    """sum_k softmax_k(score) update_k over the updates of a round, in the memory of at most KEPT_BANDS sums.

    Scores that differ by less than 5.5, the usual case, need one or two of them. like: name -> tensor; the
    shapes and device of every update to come; grid, for weights up to LARGEST, and
    model_size: as in ExactSum.
    """

    def __init__(self, like: Mapping[str, Tensor], grid: SumGrid, model_size: int = 0) -> None:
        self._like, self._grid, self._model_size = like, grid, model_size
        self._bands: dict[int, ExactSum] = {}
        self._band_of: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._band_of)

    @property
    def nbytes(self) -> int:
        """Bytes of the accumulators that are held now."""
        return sum(band.nbytes for band in self._bands.values())

    def add(self, site: str, update: Mapping[str, Tensor], score: float, norm: float) -> None:
        """Add one site's update. score: of its softmax weight. norm: its L2 norm.

        Raises OverflowError when sums of such sizes do not fit; nothing is added then.
        """
        band, weight = _place(score)
        if band > self._top - KEPT_BANDS:
            if band not in self._bands:
                self._bands[band] = ExactSum(self._like, self._grid, self._model_size)
            self._bands[band].add({name: update[name] for name in self._like}, weight, norm)
            for low in [held for held in self._bands if held <= self._top - KEPT_BANDS]:
                del self._bands[low]
        self._band_of[site] = band, weight

    def compute_weights(self) -> dict[str, float]:
        """site -> softmax weight, in the order of names; they add up to one."""
        relative = {
            site: math.ldexp(weight, BAND_BITS * (band - self._top)) if band in self._bands else 0.0
            for site, (band, weight) in sorted(self._band_of.items())
        }
        total = math.fsum(relative.values())
        return {site: weight / total for site, weight in relative.items()}

    def value(self) -> dict[str, Tensor]:
        """The weighted sum, float64, in the updates' shapes. Raises ValueError without any update."""
        if not self._band_of:
            raise ValueError("softmax over no site at all")
        bands = sorted(self._bands.items(), reverse=True)
        scales = [math.ldexp(1.0, BAND_BITS * (band - self._top)) for band, _ in bands]
        total = math.fsum(scale * band.weight for scale, (_, band) in zip(scales, bands, strict=True))
        result: dict[str, Tensor] = {}
        for scale, (_, band) in zip(scales, bands, strict=True):
            for name, tensor in band.value().items():
                result[name] = torch.add(result[name], tensor, alpha=scale) if name in result else tensor
        return {name: tensor.div_(total) for name, tensor in result.items()}

    @property
    def _top(self) -> int:
        return max(self._bands, default=-(2**62))


def _place(score: float) -> tuple[int, float]:
    """(band, weight inside it, from 1 to 2^8) of exp(score)."""
    bits = score * math.log2(math.e)
    band = math.floor(bits / BAND_BITS)
    return band, 2.0 ** (bits - BAND_BITS * band)

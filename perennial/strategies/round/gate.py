"""The one gate that every reply passes before any arithmetic.

A reply that does not pass is dropped, counted and named, and never reaches the model; the round goes on with
the rest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from flwr.app import Message
from torch import Tensor

from perennial.config.rounds import LEAST_SITES, MAX_SAMPLES, WINDOW, BoundsConfig, compute_level
from perennial.foundation.errors import REASON, ProtocolError, clean_text
from perennial.foundation.plain import Plain, PlainObject, read_object
from perennial.protocol.fields import find_arrays, read_kind
from perennial.protocol.messages import Refusal, TrainReply
from perennial.protocol.stack import Stack
from perennial.protocol.stamp import MAX_EXAMPLES, Stamp
from perennial.protocol.tensors import Tensors, unpack
from perennial.strategies.round.exchange import describe_error


@dataclass(frozen=True)
class Admitted:
    """A reply that passed the gate. update: name -> tensor, after minus before; norm: its L2 norm."""

    site: str
    update: Mapping[str, Tensor]
    norm: float
    num_examples: int
    train_loss: float | None = None
    steps: int = 0
    base_round: int = 0
    """Round of the model that the site started from."""
    metrics: Mapping[str, Plain] = field(default_factory=dict)
    lends_digests: bool = True
    notes: tuple[str, ...] = ()
    """What was changed of it on its way in, for the journal."""
    scaled: bool = False
    """Whether the update was above the norm bound, and was scaled down."""
    capped: bool = False
    """Whether the site counts as fewer samples than it claimed."""
    stand_in: bool = False
    """Made at the server in place of an absent site: what is remembered of a site must not learn from it."""


class Rejected(Exception):
    """Raised for a reply that is dropped; the message says why, for the journal."""


class Refused(Exception):
    """Raised when a site refuses a request; the message is its reason."""


@dataclass
class Gate:
    """The conditions that replies of one round must meet.

    reference: the model that was sent. stamp: the round's; None under Flower's own start(), which has none.
    max_update_norm: L2 norm above which an update is dropped; None: no bound.
    staleness: rounds by which a reply may be late.
    max_samples: the most samples with which a site counts, whatever it claims.
    """

    reference: Mapping[str, Tensor]
    stamp: Stamp | None
    max_update_norm: float | None = None
    staleness: int = 0
    max_samples: int = MAX_SAMPLES

    def __post_init__(self) -> None:
        self._seen: set[str] = set()

    def admit(self, message: Message, site: str) -> Admitted:
        """Check a reply and return its content. Raises Rejected or Refused with the reason."""
        if message.has_error():
            raise Rejected(describe_error(clean_text(message.error.reason or "unknown", REASON)))
        try:
            kind = read_kind(message.content)
            if kind == Refusal.__name__:
                refusal = Refusal.from_record(message.content)
                raise Refused(clean_text(f"{refusal.kind}: {refusal.reason}", REASON))
            reply = self._admit_own(message, site) if kind else self._admit_flower(message, site)
        except (ProtocolError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise Rejected(clean_text(str(error), REASON)) from error
        except Rejected as error:
            # names of tensors and figures come from the site
            raise Rejected(clean_text(str(error), REASON)) from error
        return self._count_reply(reply)

    def admit_stack(self, stack: Stack, sites: Sequence[str]) -> tuple[list[Admitted], list[int]]:
        """Check a stack: (replies that pass, indices of those that must be checked one by one).

        The model of a stack is checked once; what its sites say was made by this very code.
        """
        first = stack.replies[0]
        try:
            self._check_round(first)
            self._check_shapes(first.update)
        except Rejected:
            return [], [*range(len(sites))]
        passed, apart = [], []
        for place, (site, reply) in enumerate(zip(sites, stack.replies, strict=True)):
            reply.update.norm = stack.norms[place]
            try:
                passed.append(self._count_reply(self._build_admitted(site, reply)))
            except Rejected:
                apart.append(place)
        return passed, apart

    def _count_reply(self, reply: Admitted) -> Admitted:
        """The reply as it counts; raises Rejected for the second one of a site."""
        if reply.site in self._seen:
            raise Rejected("a second reply in the same round; the first one counts")
        self._seen.add(reply.site)
        if reply.num_examples <= self.max_samples:
            return reply
        note = f"has {reply.num_examples} samples, and counts as {self.max_samples} (max_samples)"
        return replace(reply, num_examples=self.max_samples, notes=(note,))

    def _admit_own(self, message: Message, site: str) -> Admitted:
        reply = TrainReply.from_record(message.content)
        self._check_round(reply)
        self._check_shapes(reply.update)
        return self._build_admitted(site, reply)

    def _build_admitted(self, site: str, reply: TrainReply) -> Admitted:
        metrics = _parse_metrics(reply.metrics)
        return Admitted(
            site,
            reply.update,
            self._check_norm(reply.update),
            reply.num_examples,
            reply.train_loss,
            reply.steps,
            reply.round,
            metrics,
            reply.lends_digests,
        )

    def _admit_flower(self, message: Message, site: str) -> Admitted:
        """Admit a reply by Flower's convention: the whole model after training.

        `num-examples` is among the metrics, and `num-steps` may be.
        """
        arrays = find_arrays(message.content)
        metrics = next(iter(message.content.metric_records.values()), None)
        if arrays is None or metrics is None:
            raise Rejected("a reply needs one ArrayRecord and one MetricRecord")
        after = unpack(arrays, "reply")
        # integer buffers (BatchNorm's counters) are never averaged: the server keeps its own
        floats = {name: tensor for name, tensor in after.items() if tensor.is_floating_point()}
        self._check_shapes(floats)
        update = Tensors({name: floats[name] - tensor for name, tensor in self.reference.items()})
        loss = metrics.get("train_loss", metrics.get("loss"))
        return Admitted(
            site,
            update,
            self._check_norm(update),
            _check_examples(metrics.get("num-examples")),
            float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None,
            steps if type(steps := metrics.get("num-steps", 0)) is int and steps >= 0 else 0,
        )

    def _check_round(self, reply: Stamp) -> None:
        assert self.stamp is not None
        difference = self.stamp.find_mismatch(reply)
        late_by = self.stamp.round - reply.round
        if difference.startswith("round:") and 0 < late_by <= self.staleness:
            return
        if difference:
            raise Rejected(f"stale or foreign reply: {difference}")

    def _check_shapes(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self.reference.keys():
            missing = sorted(self.reference.keys() - tensors.keys())
            extra = sorted(tensors.keys() - self.reference.keys())
            raise Rejected(f"tensors: missing {missing[:3] or 'none'}, unexpected {extra[:3] or 'none'}")
        for name, tensor in tensors.items():
            expected = self.reference[name]
            # exact shapes: broadcasting would otherwise hide a (M, 1) in place of (M, d)
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise Rejected(
                    f"tensor {name!r}: found {tensor.dtype} {tuple(tensor.shape)}, "
                    f"expected {expected.dtype} {tuple(expected.shape)}"
                )

    def _check_norm(self, update: Tensors) -> float:
        norm = update.norm
        if not math.isfinite(norm):
            raise Rejected("update: norm is not finite")
        if self.max_update_norm is not None and norm > self.max_update_norm:
            raise Rejected(f"update: norm {norm:.4g} is above max_update_norm {self.max_update_norm:.4g}")
        return norm


def _parse_metrics(metrics: str) -> PlainObject:
    try:
        return read_object(metrics)
    except ValueError as error:
        raise Rejected(f"metrics: {error}") from error


def _check_examples(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 1 <= value <= MAX_EXAMPLES:
        raise Rejected(f"num-examples: found {value!r}, allowed an integer from 1 to {MAX_EXAMPLES}")
    return value


NORMS, COUNTS, MET = "norms", "counts", "met"


@dataclass
class RunningBounds:
    """Bounds an update's norm by earlier rounds' medians, and a site's samples by the last round's counts.

    state: a dict of the checkpoint, kept up to date here: median norms of the latest rounds, samples of each
    site of the last one, and who met a bound.
    """

    config: BoundsConfig
    state: dict[str, Any]

    def __post_init__(self) -> None:
        self.state.setdefault(NORMS, [])
        self.state.setdefault(COUNTS, {})
        self.state.setdefault(MET, {})
        self._first, self._first_counts = 0.0, dict[str, int]()

    @property
    def met(self) -> dict[str, dict[str, int]]:
        """site -> in how many rounds its update was scaled down, and its samples were capped."""
        return self.state[MET]

    @property
    def waiting(self) -> bool:
        """Whether there is no earlier round, so that bounds must follow from the round's own replies."""
        wanted = self.config.norm_multiple is not None or self.config.most_share < 1
        return wanted and not self.state[NORMS]

    def see_all(self, replies: Iterable[Admitted]) -> None:
        """Take the bounds from these replies, all of a first round, before any of them is bounded."""
        self._first, self._first_counts = _summarise_replies(replies)

    def needs_bound(self, reply: Admitted) -> bool:
        """Whether a bound would change the reply, or drop it."""
        return self.is_over_bound(reply.norm) or reply.num_examples > self._limit_samples(
            reply.site, reply.num_examples
        )

    def bound_reply(self, reply: Admitted, scalable: bool) -> Admitted:
        """The reply with its norm and samples bounded, and a note for each change.

        scalable: whether the method accepts scaled updates. Raises Rejected for an update above the bound of
        one that does not.
        """
        notes = list(reply.notes)
        samples, most = reply.num_examples, self._limit_samples(reply.site, reply.num_examples)
        if samples > most:
            key = "registered" if reply.site in self.config.registered else "share"
            notes.append(f"has {samples} samples, and counts as {most} (bounds.{key})")
            reply = replace(reply, num_examples=most, capped=True)
        limit = self._longest
        if limit is None or reply.norm <= limit:
            return replace(reply, notes=tuple(notes))
        sentence = f"update: norm {reply.norm:.4g} is above {limit:.4g}, {self.config.norm_multiple:g} times "
        sentence += "the median of former rounds (bounds.norm_multiple)"
        if not scalable:
            raise Rejected(sentence)
        factor = limit / reply.norm
        update = Tensors({name: tensor * factor for name, tensor in reply.update.items()})
        notes.append(f"{sentence}; scaled down")
        return replace(reply, update=update, norm=limit, notes=tuple(notes), scaled=True)

    def round_done(self, replies: Iterable[Admitted]) -> None:
        """Note norms and samples of the replies in a round's model, for later bounds, and who met a bound."""
        replies = list(replies)
        listed = bool(self.config.in_words)
        for reply in replies:
            if listed or reply.scaled or reply.capped:
                met = self._find_counts(reply.site)
                met["scaled"] += reply.scaled
                met["capped"] += reply.capped
        median_norm, counts = _summarise_replies(replies)
        if counts:
            self.state[NORMS] = [*self.state[NORMS], median_norm][-WINDOW:]
            self.state[COUNTS] = counts
        self._first, self._first_counts = 0.0, {}

    def is_over_bound(self, norm: float) -> bool:
        """Whether an update of this norm is above the bound."""
        limit = self._longest
        return limit is not None and norm > limit

    def _find_counts(self, site: str) -> dict[str, int]:
        return self.state[MET].setdefault(site, {"scaled": 0, "capped": 0})

    def _limit_samples(self, site: str, claimed: int) -> int:
        if site in self.config.registered:
            return self.config.registered[site]
        counts = self.state[COUNTS] or self._first_counts
        others = [count for name, count in counts.items() if name != site]
        if len(others) + 1 < LEAST_SITES:
            return claimed
        # the level of whole counts may come out a rounding below a whole number
        return max(1, int(min(claimed, compute_level([*others, claimed], self.config.most_share) + 1e-6)))

    @property
    def _longest(self) -> float | None:
        usual, multiple = max(self.state[NORMS], default=self._first), self.config.norm_multiple
        # if the median update is zero there is no size to compare with
        return multiple * usual if multiple is not None and usual > 0 else None


def _summarise_replies(replies: Iterable[Admitted]) -> tuple[float, dict[str, int]]:
    """(median norm, samples of each site) of the replies that sites sent themselves."""
    sent = [reply for reply in replies if not reply.stand_in]
    norms = [reply.norm for reply in sent]
    return median(norms) if norms else 0.0, {reply.site: reply.num_examples for reply in sent}

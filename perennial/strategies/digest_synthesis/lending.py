"""Borrows digests from sites, and keeps track of which sites declined or took theirs back."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flwr.serverapp import Grid

from perennial.config import charges
from perennial.foundation.errors import ConfigError, ProtocolError
from perennial.models.digest_networks import FeatureEncoder, compute_digest_shape, hash_encoder
from perennial.privacy.config import DigestConfig
from perennial.privacy.digests import DigestGuarantee, compute_guarantee, guess_log10
from perennial.privacy.entries import Entry
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import DigestReply, DigestRequest, Refusal
from perennial.protocol.stamp import Stamp
from perennial.strategies.digest_synthesis.store import DigestStore, check_digest_reply
from perennial.strategies.round.context import RunContext
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.exchange import parse_reply as checked_reply
from perennial.strategies.round.request import RoundRequest


class DigestLending:
    """Collects digests from the sites and keeps them, to stand in for absent ones.

    digests: the experiment's settings of them. store: those that are kept.
    withdrawals: how often a site has taken its digests back.
    rounds_stood_in: site -> rounds in which its digests stood in for it.
    """

    def __init__(self, run: RunContext) -> None:
        """Begin without digests. Raises ConfigError if the experiment has no settings of digests."""
        if run.experiment.digests is None:
            raise ConfigError("digests: missing; strategy digest_synthesis needs to know how they are made")
        self.digests = run.experiment.digests
        self.store = DigestStore()
        self.withdrawals = 0
        self.rounds_stood_in: dict[str, int] = {}
        self._run = run
        self._exchange = Exchange()
        self._declined: dict[str, int] = {}
        self._to_ask_again: set[str] = set()
        self._withdrawn: list[str] = []

    def borrow(self, grid: Grid, request: RoundRequest, notes: list[str]) -> int:
        """Ask sites that have not lent this task's digests; returns the bytes received.

        notes: gets a sentence for each site that failed or took its digests back.
        """
        task = request.stamp.task
        asked = {
            site: node
            for site, node in request.sites.items()
            if site in self._to_ask_again
            or not (self.store.holds(site, task) or self._declined.get(site) == task)
        }
        self._to_ask_again -= asked.keys()
        record, charge = self._run.releases, self._charge(request.stamp)
        if record is not None:
            record.asked(request.stamp.round, asked, charge, once=f"digest-{task}")
        replies, declined = self._collect(grid, asked, request, notes)
        self._declined |= dict.fromkeys(declined, task)
        if record is not None:
            lent_nothing = [*declined, *(site for site, reply in replies.items() if reply.digests is None)]
            record.refused(request.stamp.round, lent_nothing, charge, once=f"digest-{task}")
        received = 0
        for site, reply in replies.items():
            try:
                received += self._take(site, reply, notes)
            except ProtocolError as error:
                self._declined[site] = task
                notes.append(f"digests of {site}: {error}")
        return received

    def _collect(
        self, grid: Grid, sites: Mapping[str, int], request: RoundRequest, notes: list[str]
    ) -> tuple[dict[str, DigestReply], list[str]]:
        """(replies by site in the order of sites, sites that declined for this task).

        A site that does not answer in time is asked again in a later round.
        """
        message = DigestRequest(**request.stamp.stamp_fields, encoder=self._encoder)
        asked = [(site, node, message) for site, node in sites.items() if not self._exchange.is_busy(site)]
        replies: dict[str, DigestReply] = {}
        problems: dict[str, str] = {}
        declined: list[str] = []
        for site, found in self._exchange.run(grid, asked, request.deadline) if asked else ():
            try:
                if not found.has_error() and read_kind(found.content) == Refusal.__name__:
                    declined.append(site)
                replies[site] = checked_reply(found, (DigestReply,), [message])
            except ProtocolError as error:
                problems[site] = f"digests of {site}: {error}"
        notes += [problems[site] for site in sorted(problems)]
        return {site: replies[site] for site, _, _ in asked if site in replies}, declined

    def ask_again(self, site: str) -> None:
        """Ask a lender that refused to train again in its next round: it may want its digests back too."""
        if site in self.store.sites:
            self._to_ask_again.add(site)

    def withdraw(self, site: str, notes: list[str]) -> None:
        """Forget a site's digests, and count the withdrawal, which resets networks that learnt from them."""
        if self.store.drop(site):
            self._withdrawn.append(site)
            self.withdrawals += 1
            notes.append(f"site {site} has withdrawn its digests; the guidance starts anew")

    def build_summary_block(self) -> dict[str, Any]:
        """The summary's block on the digests that the server holds, by site, and their epsilon."""
        encoder = f"random, SHA-256 {self._encoder:.12}"
        length = math.prod(compute_digest_shape(self._run.input_shape))
        return {"encoder": encoder} | build_digest_block(
            self.digests, length, self.store, self.rounds_stood_in, self._withdrawn
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs."""
        facts = {
            "declined": self._declined,
            "ask_again": sorted(self._to_ask_again),
            "rounds_stood_in": self.rounds_stood_in,
            "withdrawals": self.withdrawals,
            "withdrawn": self._withdrawn,
        }
        return {"lending": facts} | self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        facts = state["lending"]
        self._declined, self._to_ask_again = dict(facts["declined"]), set(facts["ask_again"])
        self.rounds_stood_in = dict(facts["rounds_stood_in"])
        self.withdrawals, self._withdrawn = facts["withdrawals"], list(facts["withdrawn"])
        self.store.load_state_dict(state)

    def _charge(self, stamp: Stamp) -> list[Entry]:
        """What a site charges for the digests of one task."""
        guarantee = compute_published_guarantee(
            self.digests, math.prod(compute_digest_shape(self._run.input_shape))
        )
        mechanisms = charges.price_digests(self._run.experiment, stamp.run, self.digests, guarantee)
        return [mechanism.entry for mechanism in mechanisms]

    @cached_property
    def _encoder(self) -> str:
        """Hash of the encoder that the digests must come from."""
        experiment = self._run.experiment
        return hash_encoder(FeatureEncoder(self._run.input_shape, experiment.seed))

    def _take(self, site: str, reply: DigestReply, notes: list[str]) -> int:
        """Keep or forget a site's digests, as it says; returns the bytes that came."""
        if reply.digests is None:
            self._declined[site] = reply.task
            self.withdraw(site, notes)
            return 0
        if self.store.holds(site, reply.task):
            return 0
        shape = compute_digest_shape(self._run.input_shape)
        digests = check_digest_reply(reply, self._encoder, shape, self.digests.per_digest)
        self.store.put(site, reply.task, digests)
        if site in self._withdrawn:
            self._withdrawn.remove(site)
        return 4 * (digests.features.numel() + digests.labels.numel())


FLOAT_LEVELS = 2**32


def build_digest_block(
    config: DigestConfig,
    length: int,
    store: DigestStore,
    rounds_stood_in: Mapping[str, int],
    withdrawn: Sequence[str],
) -> dict[str, Any]:
    """The `digest` block: figures by name, and a row for each site. length: numbers in one digest.

    A class is without digests if each site that lends has fewer samples of it than one digest takes.
    """
    guarantee = compute_published_guarantee(config, length)
    sites = {
        site: {
            "digests": sum(len(digests.features) for digests in store.list_digests(site).values()),
            "samples": store.samples(site),
            "bytes": store.bytes(site),
            "tasks": list(store.list_digests(site)),
            "rounds_stood_in": rounds_stood_in.get(site, 0),
        }
        for site in store.sites
    }
    block: dict[str, Any] = {
        "samples_per_digest": config.per_digest,
        "numbers_per_digest": length,
        "mixing": config.mix,
        "protection": config.protection,
    }
    if guarantee.nominal is not None:
        block["nominal_epsilon"] = guarantee.nominal
    block["epsilon_of_one_sample"] = _round_epsilon(guarantee.epsilon)
    if guarantee.if_public is not None:
        block["epsilon_of_one_sample_were_the_scale_public"] = _round_epsilon(guarantee.if_public)
    block |= {
        "delta": guarantee.delta,
        "epsilon_of_one_label": _round_epsilon(guarantee.label_epsilon),
        "guess_heuristic_log10": round(guess_log10(length, FLOAT_LEVELS, config.per_digest), 1),
    }
    if missing := store.find_missing_classes():
        block["classes_without_digests"] = missing
    if withdrawn:
        block["withdrawn"] = list(withdrawn)
    return block | {"sites": sites}


def compute_published_guarantee(config: DigestConfig, length: int) -> DigestGuarantee:
    """The privacy guarantee of digests of `length` numbers, from the experiment's settings alone."""
    # the published scale is a share of the bound, so the bound itself does not matter to its epsilon
    return compute_guarantee(config, length, config.largest or 1.0)


def _round_epsilon(epsilon: float) -> float | str:
    return round(epsilon, 4) if math.isfinite(epsilon) else "infinite"

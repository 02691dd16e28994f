"""The end of a personal phase: sites join shared and own layers, keep the result, and report its accuracy."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.serverapp import Grid
from torch import Tensor

from perennial.foundation.errors import ProtocolError
from perennial.privacy.noised_counts import CountNoise
from perennial.protocol.messages import PersonalModelReply, PersonalModelRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.exchange import Exchange, ask, check_possible, check_withheld
from perennial.strategies.round.request import RoundRequest


def complete_personal_models(
    grid: Grid,
    exchange: Exchange,
    request: RoundRequest,
    models: Mapping[int, Mapping[str, Tensor]],
    clusters: Mapping[str, int],
    personal: tuple[str, ...],
    dropped: Callable[[str, str], None],
    noise: CountNoise | None = None,
) -> dict[str, float | None]:
    """Have sites complete their own models: site -> accuracy on its held-out samples, None if not reported.

    models: the tensors sent to each cluster, all of them. clusters: site -> cluster, of the sites to ask,
    which request.sites holds. personal: layers that are the site's own. dropped: called with (site, reason)
    for each site that fails. noise: that the experiment adds to the counts.
    """
    common = {
        **request.stamp.stamp_fields,
        "personal": list(personal),
    }
    messages: dict[str, PersonalModelRequest] = {}
    for cluster, model in models.items():
        members = [site for site, own in clusters.items() if own == cluster]
        for sites, fields in request.previous.fields_for(members):
            # one object for all sites that get the same message, so that it is serialised once
            message = PersonalModelRequest(**common, arrays=Tensors(model), **fields)
            messages |= dict.fromkeys(sites, message)
    replies = ask(
        grid,
        exchange,
        [(site, request.sites[site], messages[site]) for site in clusters],
        PersonalModelReply,
        request.deadline,
        dropped,
        lambda reply: _check(reply, noise),
    )
    return {site: _accuracy(reply) for site, reply in replies.items()}


class OwnAccuracy:
    """Accuracies of the sites' own models.

    by_site: site -> accuracy after each task, None if it reported none.
    by_round: round, task and mean over sites, for each round that was measured.
    """

    def __init__(self) -> None:
        self.by_site: dict[str, list[float | None]] = {}
        self.by_round: list[dict[str, Any]] = []

    def add(self, accuracies: Mapping[str, float | None], number: int, task: int) -> float | None:
        """Note the accuracies of a round; returns their mean, None when no site reported one."""
        reported = [value for _, value in sorted(accuracies.items()) if value is not None]
        mean = sum(reported) / len(reported) if reported else None
        self.by_round.append({"round": number, "task": task, "accuracy": mean})
        for site, accuracy in accuracies.items():
            row = self.by_site.setdefault(site, [])
            row += [None] * (task - len(row))
            row[task - 1] = accuracy
        return mean

    @property
    def reported(self) -> list[float]:
        """The mean of each round in which a site reported an accuracy, in order."""
        return [entry["accuracy"] for entry in self.by_round if entry["accuracy"] is not None]


def _accuracy(reply: PersonalModelReply) -> float | None:
    samples = sum(reply.total or [])
    # noise can bring any count below 0, and right answers above the samples
    return min(1.0, max(0.0, sum(reply.correct or []) / samples)) if samples > 0 else None


def _check(reply: PersonalModelReply, noise: CountNoise | None) -> None:
    reported: list[Any] = [reply.correct, reply.total]
    if reported == [None, None]:
        return
    if None in reported or not len(reported[0]) == len(reported[1]) == reply.num_classes:
        raise ProtocolError(f"PersonalModelReply: correct, total: allowed {reply.num_classes} counts each")
    correct, total = reported
    check_possible(correct, total, noise)
    check_withheld(reply.withheld, total)

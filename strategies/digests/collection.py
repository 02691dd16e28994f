"""Asks sites for their digests, and records who lends, who declines and who does not answer."""

from collections.abc import Mapping

from flwr.serverapp import Grid

from perennial.foundation.errors import ProtocolError
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import DigestReply, DigestRequest, Refusal
from perennial.protocol.stamp import Stamp, require_same_round
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.queries import describe_error


def collect(
    grid: Grid, exchange: Exchange, sites: Mapping[str, int], stamp: Stamp, encoder: str, deadline: float
) -> tuple[dict[str, DigestReply], list[str], list[str]]:
    """(replies by site in the order of sites, warnings, sites that declined for this task).

    sites: name -> node id. A site that does not answer in time is asked again in a later round.
    """
    request = DigestRequest(**stamp.stamp_fields, encoder=encoder)
    asked = [(site, node, request) for site, node in sites.items() if not exchange.busy(site)]
    replies: dict[str, DigestReply] = {}
    problems: dict[str, str] = {}
    declined: list[str] = []
    for site, message in exchange.run(grid, asked, deadline) if asked else ():
        try:
            if message.has_error():
                raise ProtocolError(describe_error(message.error.reason or "unknown"))
            if read_kind(message.content) == Refusal.__name__:
                declined.append(site)
                refusal = Refusal.from_record(message.content)
                raise ProtocolError(f"{refusal.kind}: {refusal.reason}")
            reply = DigestReply.from_record(message.content)
            require_same_round(request, reply)
            replies[site] = reply
        except ProtocolError as error:
            problems[site] = f"digests of {site}: {error}"
    warnings = [problems[site] for site in sorted(problems)]
    return {site: replies[site] for site, _, _ in asked if site in replies}, warnings, declined

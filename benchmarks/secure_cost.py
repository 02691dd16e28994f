"""What masks cost against the clear: `python -m benchmarks.secure_cost`.

One sum of 40 updates with as many values as ResNet-18 has (11,173,962), no drop-outs, on one core: the bytes
of a site's messages as Flower serialises them, and seconds of processor time of a site and of the server, on
32-bit and on 64-bit words. The clear is what a round without masks does with the same updates: the gate and
the exact sum; its part that is the sum alone stands beside it. Then Flower's SecAgg+
(benchmarks/secure_cost_flower.py) on the same arrays. Results: results/secure_cost.json.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Message

from benchmarks.environment import machine, versions
from benchmarks.secure_cost_flower import secagg_plus
from perennial.deploy.flower_seam import recorddict_from_proto, recorddict_to_proto
from perennial.engine.grid import set_task_identity
from perennial.foundation.files import replace_file
from perennial.models.sum_grid import SumGrid
from perennial.privacy.discrete_gaussian import SecureWords, discrete_gaussian
from perennial.privacy.secure.keys import new_secret
from perennial.privacy.secure.masks import Words
from perennial.privacy.secure.parameters import Parameters
from perennial.privacy.secure.roster import Attempt, Peer, Subject
from perennial.privacy.secure.server_session import ServerSession
from perennial.privacy.secure.site_session import SiteSession
from perennial.protocol import secure_messages as wire
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainReply, TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.gate import Gate
from perennial.strategies.sums.exact_sum import ExactSum

VALUES = 11_173_962
SITES = 40
COLLUDERS = 8
NORM = 2.0
"""sums.largest_norm."""
RESULTS = Path(__file__).with_name("results") / "secure_cost.json"
STAMP: dict[str, Any] = {
    "run": "0" * 16,
    "experiment": "0" * 64,
    "class_order": "0" * 64,
    "task": 1,
    "round": 1,
    "num_classes": 10,
}
T = TypeVar("T")


def update_of(site: int) -> torch.Tensor:
    """(VALUES,) float32 of norm 1."""
    generator = torch.Generator().manual_seed(site)
    vector = torch.randn(VALUES, generator=generator)
    return vector.div_(vector.norm())


@dataclass
class Clock:
    """Seconds of processor time by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, phase: str, call: Callable[[], T]) -> T:
        start = time.process_time()
        result = call()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - start
        return result

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Traffic:
    """What one site's messages weigh, and a copy of each as its receiver gets it."""

    def __init__(self) -> None:
        self.bytes = 0

    def over(self, message: WireMessage, clock: Clock, phase: str) -> Any:
        """The record that arrives; making the message's record is the sender's time, the way is nobody's."""
        sent = recorddict_to_proto(clock(phase, message.to_record))
        self.bytes += sent.ByteSize()
        return recorddict_from_proto(sent)


def clear_sum() -> tuple[dict[str, float], torch.Tensor]:
    """Costs of the sum that sees every update, and the exact mean."""
    like, grid = {"w": torch.zeros(VALUES)}, SumGrid(SITES, 1.0, NORM, 64)
    ExactSum(like, grid).add({"w": update_of(0)}, 1.0, 1.0 + 1e-6)  # compiles
    total, gate = ExactSum(like, grid), Gate(like, Stamp(**STAMP))
    site, server, traffic = Clock(), Clock(), Traffic()
    for index in range(SITES):
        reply = TrainReply(**STAMP, update=Tensors(w=update_of(index)), num_examples=1)
        message = Message(traffic.over(reply, site, "send"), dst_node_id=1, message_type="train")
        admitted = server("gate", lambda message=message, name=f"site-{index}": gate.admit(message, name))
        server("sum", lambda admitted=admitted: total.add(admitted.update, 1.0, admitted.norm))
    return {
        "site_seconds": site.total / SITES,
        "site_bytes": traffic.bytes / SITES,
        "server_seconds": server.total,
        "server_sum_seconds": server.seconds["sum"],
    }, total.value()["w"] / SITES


def masked_sum(bits: Literal[32, 64], exact: torch.Tensor) -> dict[str, Any]:
    """Costs of the masked sum, of every message but the model itself."""
    grid = SumGrid(SITES, 1.0, NORM, bits)
    names = [f"site-{index:03d}" for index in range(SITES)]
    identity, cipher = ({name: new_secret() for name in names} for _ in range(2))
    peers = [Peer.introduce(name, identity[name], cipher[name], STAMP["run"], 1) for name in names]
    attempt, subject = Attempt(STAMP["run"], 1, 1), Subject(1, "update", "0" * 64)
    site, at_server, traffic = Clock(), Clock(), Traffic()
    stamp = {**STAMP, "attempt": 1}

    sessions: dict[str, SiteSession] = {}
    ask = wire.ShareRequest(
        **stamp,
        peers=names,
        peer_identities=[peer.identity for peer in peers],
        peer_ciphers=[peer.cipher for peer in peers],
        peer_signatures=[peer.signature for peer in peers],
    )
    for name in names:
        traffic.over(ask, at_server, "relay")
        sessions[name] = site(
            "ahead",
            lambda name=name: SiteSession.prepare(
                name, attempt, Parameters(COLLUDERS), peers, cipher[name], identity[name], lambda *_: None
            ),
        )
        advert = sessions[name].advert
        reply = wire.ShareReply(
            **stamp,
            mask=advert.member.mask,
            commitment=advert.member.commitment,
            signature=advert.member.signature,
            receivers=list(advert.shares),
            shares=list(advert.shares.values()),
        )
        traffic.over(reply, site, "ahead")
    server = ServerSession(attempt, Parameters(COLLUDERS), peers, subject)
    adverts = {name: session.advert for name, session in sessions.items()}
    at_server("relay", lambda: server.enrol(adverts, names))

    roster = TrainRequest(
        **stamp,
        arrays=Tensors(),
        roster=names,
        roster_masks=[member.mask for member in server.members],
        roster_commitments=[member.commitment for member in server.members],
        roster_signatures=[member.signature for member in server.members],
        sum_updates=SITES,
    )
    signed = np.int64 if bits == 64 else np.int32
    for index, name in enumerate(names):
        update = update_of(index)
        traffic.over(roster, at_server, "relay")

        def masked(session: SiteSession = sessions[name], update: torch.Tensor = update) -> Words:
            words = site("encode", lambda: _words(grid, update))
            session.enrol(subject, server.members)
            site("mask", lambda: session.mask(words))
            return words

        words = masked()
        tensor = torch.from_numpy(words.view(signed))
        record = traffic.over(wire.MaskedReply(**stamp, words=Tensors(words=tensor)), site, "send")
        reply = at_server("parse", lambda record=record: wire.MaskedReply.from_record(record))
        values = reply.words["words"].numpy().view(words.dtype)
        at_server("sum", lambda name=name, values=values: server.add(name, values))
    server.close()

    for name in names:
        shares = server.shares_for(name)
        vote = wire.VoteRequest(
            **stamp, survivors=server.survivors, senders=list(shares), shares=list(shares.values())
        )
        traffic.over(vote, at_server, "relay")
        keys = cipher[name], identity[name]
        signature = site(
            "vote",
            lambda name=name, keys=keys, shares=shares: sessions[name].sign(server.survivors, shares, *keys),
        )
        traffic.over(wire.VoteReply(**stamp, signature=signature), site, "vote")
        at_server("relay", lambda name=name, signature=signature: server.add_vote(name, signature))
    for name in names:
        request = wire.OpenRequest(
            **stamp,
            survivors=server.survivors,
            voters=list(server.votes),
            votes=list(server.votes.values()),
        )
        traffic.over(request, at_server, "relay")
        given = site("open", lambda name=name: sessions[name].open(server.survivors, server.votes))
        reply = wire.OpenReply(
            **stamp,
            seeds_of=list(given.seeds),
            seeds=list(given.seeds.values()),
            keys_of=list(given.keys),
            keys=list(given.keys.values()),
        )
        traffic.over(reply, site, "open")
        at_server("relay", lambda name=name, given=given: server.add_opening(name, given))
    opened = at_server("unmask", server.open)
    mean = torch.from_numpy(opened.view(signed).astype(np.int64)).double().mul_(grid.step / SITES)
    return {
        "bits": bits,
        "site_seconds": site.total / SITES,
        "site_phases": {phase: seconds / SITES for phase, seconds in site.seconds.items()},
        "server_seconds": at_server.total,
        "server_phases": at_server.seconds,
        "site_bytes": traffic.bytes / SITES,
        "largest_error_of_the_mean": float((mean - exact).abs().max()),
    }


def _words(grid: SumGrid, update: torch.Tensor) -> Words:
    steps = grid.integers({"w": update}, 1.0)["w"].numpy()
    return steps.view(np.uint64) if grid.bits == 64 else steps.astype(np.uint32)


def noise_seconds() -> float:
    """Of one site's share of the noise on one update, estimated from 2^20 values."""
    clock = Clock()
    clock("noise", lambda: discrete_gaussian(1 << 20, 1 << 20, SecureWords()))
    return clock.total * VALUES / (1 << 20)


def main() -> dict[str, Any]:
    """Measure, print and store."""
    torch.set_num_threads(1)
    set_task_identity()
    clear, exact = clear_sum()
    masked = [masked_sum(32, exact), masked_sum(64, exact)]
    flower = secagg_plus(SITES, lambda site: update_of(site).numpy(), exact.numpy())
    for found in (*masked, flower):
        found["bytes_over_clear"] = found["site_bytes"] / clear["site_bytes"]
        found["site_seconds_beyond_clear"] = found["site_seconds"] - clear["site_seconds"]
        found["server_over_clear"] = found["server_seconds"] / clear["server_seconds"]
        found["server_over_clear_sum_alone"] = found["server_seconds"] / clear["server_sum_seconds"]
    result: dict[str, Any] = {
        "values": VALUES,
        "sites": SITES,
        "assumed_colluders": COLLUDERS,
        "clear": clear,
        "masked": masked,
        "flower_secaggplus": flower,
        "shared_noise_seconds": noise_seconds(),
        "machine": machine(),
        "versions": versions(("flwr", "torch", "numpy", "cryptography")),
    }
    text = json.dumps(result, indent=1)
    replace_file(RESULTS, (text + "\n").encode(), 0o644)
    print(text)
    return result


if __name__ == "__main__":
    main()

"""What masks cost against the clear: `perennial bench secure_cost`.

One sum of 40 updates with as many values as ResNet-18 has (11,173,962), no drop-outs, on one core: bytes of a
site's messages, seconds of processor time of a site and of the server beyond the clear, on 32-bit and on
64-bit words. Beside it Flower's SecAgg+, whose own functions make its quantisation and its masks on the same
arrays: neighbours as there, everybody. Results: results/secure_cost.json.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perennial.benchmarks.environment import machine, versions
from perennial.deploy.flower_seam import dequantize, pseudo_rand_gen, quantize
from perennial.foundation.files import replace_file
from perennial.models.sum_grid import SumGrid
from perennial.privacy.discrete_gaussian import SecureWords, discrete_gaussian
from perennial.privacy.secure.keys import new_secret
from perennial.privacy.secure.parameters import Parameters
from perennial.privacy.secure.roster import Attempt, Peer, Subject
from perennial.privacy.secure.server_session import ServerSession
from perennial.privacy.secure.site_session import SiteSession
from perennial.strategies.sums.exact_sum import ExactSum

VALUES = 11_173_962
SITES = 40
COLLUDERS = 8
RESULTS = Path(__file__).with_name("results") / "secure_cost.json"
RUN = "0" * 16


def update_of(site: int) -> torch.Tensor:
    """(VALUES,) float32 of norm 1."""
    generator = torch.Generator().manual_seed(site)
    vector = torch.randn(VALUES, generator=generator)
    return vector.div_(vector.norm())


def clear_sum() -> tuple[dict[str, float], torch.Tensor]:
    """Costs of the sum that sees every update, and the exact mean."""
    total = ExactSum({"w": torch.zeros(VALUES)}, SumGrid(SITES, 1.0, 1.0, 64))
    total.add({"w": update_of(0)}, 1.0, 1.0 + 1e-6)  # compiles
    total = ExactSum({"w": torch.zeros(VALUES)}, SumGrid(SITES, 1.0, 2.0, 64))
    seconds = 0.0
    for site in range(SITES):
        update = update_of(site)
        seconds += _timed(lambda update=update: total.add({"w": update}, 1.0, 1.0 + 1e-6))[0]
    mean = total.value()["w"] / SITES
    return {"server_seconds": seconds, "site_bytes": 4.0 * VALUES}, mean


def masked_sum(bits: int, exact: torch.Tensor) -> dict[str, float]:
    """Costs of the masked sum; seconds are processor time of one thread."""
    grid = SumGrid(SITES, 1.0, 2.0, 64 if bits == 64 else 32)
    names = [f"site-{index:03d}" for index in range(SITES)]
    parameters = Parameters(COLLUDERS)
    identity, cipher = ({name: new_secret() for name in names} for _ in range(2))
    peers = [Peer.introduce(name, identity[name], cipher[name], RUN, 1) for name in names]
    attempt, subject = Attempt(RUN, 1, 1), Subject(1, "update", "0" * 64)
    cost = dict.fromkeys(("ahead", "encode", "mask", "vote", "open"), 0.0)
    server_seconds = 0.0
    sessions: dict[str, SiteSession] = {}
    for name in names:
        seconds, sessions[name] = _timed(
            lambda name=name: SiteSession.prepare(
                name, attempt, parameters, peers, cipher[name], identity[name], lambda *_: None
            )
        )
        cost["ahead"] += seconds
    server = ServerSession(attempt, parameters, peers, subject)
    server_seconds += _timed(
        lambda: server.enrol({name: session.advert for name, session in sessions.items()}, names)
    )[0]
    dtype = np.uint64 if bits == 64 else np.uint32
    for index, name in enumerate(names):
        update, session = update_of(index), sessions[name]
        seconds, words = _timed(
            lambda update=update: grid.integers({"w": update}, 1.0)["w"].numpy().astype(dtype)
        )
        cost["encode"] += seconds

        def mask(session: SiteSession = session, words: Any = words) -> None:
            session.enrol(subject, server.members)
            session.mask(words)

        cost["mask"] += _timed(mask)[0]
        server_seconds += _timed(lambda name=name, words=words: server.add(name, words))[0]
    server.close()
    for name in names:
        keys = cipher[name], identity[name]
        seconds, vote = _timed(
            lambda name=name, keys=keys: sessions[name].sign(server.survivors, server.shares_for(name), *keys)
        )
        cost["vote"] += seconds
        server_seconds += _timed(lambda name=name, vote=vote: server.add_vote(name, vote))[0]
    for name in names:
        seconds, opening = _timed(lambda name=name: sessions[name].open(server.survivors, server.votes))
        cost["open"] += seconds
        server_seconds += _timed(lambda name=name, opening=opening: server.add_opening(name, opening))[0]
    seconds, words = _timed(server.open)
    server_seconds += seconds
    signed = words.view(np.int64 if bits == 64 else np.int32).astype(np.int64)
    mean = torch.from_numpy(signed).double().mul_(grid.step / SITES)
    advert = sessions[names[0]].advert
    protocol = sum(len(share) for share in advert.shares.values()) + SITES * (2 * 66 + 128) + 512
    return {
        "bits": bits,
        **{f"site_{phase}_seconds": found / SITES for phase, found in cost.items()},
        "site_seconds": sum(cost.values()) / SITES,
        "server_seconds": server_seconds,
        "site_bytes": bits / 8 * VALUES + protocol,
        "largest_error_of_the_mean": float((mean - exact).abs().max()),
    }


def secagg_plus(exact: torch.Tensor) -> dict[str, float]:
    """Time and error of Flower's SecAgg+, by its own functions.

    Clipping is 1, quantisation to 2^22 levels, the modulus 2^32. One site is timed; the mean's error is that
    of all sites' quantisation.
    """
    levels, largest = 1 << 22, 1.0
    update = update_of(0).numpy()
    seconds, quantised = _timed(lambda: quantize([update], largest, levels))
    one_mask, mask = _timed(lambda: pseudo_rand_gen(b"0" * 32, 1 << 32, [update.shape]))
    adding, masked = _timed(lambda: (quantised[0] + mask[0]) % (1 << 32))
    total = np.zeros(VALUES)
    for site in range(SITES):
        found = quantize([update_of(site).numpy()], largest, levels)
        total += dequantize(found, largest, levels)[0]
    error = np.abs(total / SITES - exact.numpy()).max()
    return {
        "site_seconds": seconds + SITES * (one_mask + adding),
        "server_seconds": SITES * (one_mask + adding),
        "site_bytes": float(masked.nbytes),
        "largest_error_of_the_mean": float(error),
    }


def noise_cost() -> float:
    """Seconds for one site's share of the noise, estimated from 2^20 values."""
    return _timed(lambda: discrete_gaussian(1 << 20, 1 << 20, SecureWords()))[0] * VALUES / (1 << 20)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def main() -> dict[str, Any]:
    """Measure, print and store."""
    torch.set_num_threads(1)
    clear, exact = clear_sum()
    found: dict[str, Any] = {
        "values": VALUES,
        "sites": SITES,
        "assumed_colluders": COLLUDERS,
        "clear": clear,
        "masked": [masked_sum(bits, exact) for bits in (32, 64)],
        "flower_secaggplus": secagg_plus(exact),
        "shared_noise_seconds": noise_cost(),
        "machine": machine(),
        "versions": versions(("flwr", "torch", "numpy", "cryptography")),
    }
    for masked in found["masked"]:
        masked["bytes_over_clear"] = masked["site_bytes"] / clear["site_bytes"]
        masked["server_over_clear"] = masked["server_seconds"] / clear["server_seconds"]
        assert math.isfinite(masked["site_seconds"])
    text = json.dumps(found, indent=1)
    replace_file(RESULTS, (text + "\n").encode(), 0o644)
    print(text)
    return found


if __name__ == "__main__":
    main()

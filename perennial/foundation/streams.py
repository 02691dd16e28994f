"""Random streams, each derived from (seed, purpose, ids) and shared by nobody.

Deriving a stream by hashing instead of handing one generator around makes every draw independent of the
order in which sites, tasks and rounds happen, of the number of workers, and of a restart.
"""

from zlib import crc32

import numpy as np


def stream(seed: int, purpose: str, *ids: int | str) -> np.random.Generator:
    """The generator for one purpose, for instance ("split", site, task).

    seed: the experiment's seed, >= 0. ids: non-negative integers, or names (hashed with CRC-32).
    The same arguments give the same stream on every machine.
    """
    words = [crc32(i.encode()) if isinstance(i, str) else i for i in ids]
    entropy = [seed, crc32(purpose.encode()), *words]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def torch_seed(generator: np.random.Generator) -> int:
    """A 63-bit seed for torch.Generator.manual_seed, drawn from a stream."""
    return int(generator.integers(0, 2**63 - 1))

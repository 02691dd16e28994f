"""Whole numbers in given proportions."""

import numpy as np


def apportion(totals: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """(C, N) int64 whose row c sums to totals[c] and is as close to shares[c] as whole numbers come.

    totals: (C,) counts. shares: (C, N), non-negative, not all zero in a row; need not sum to 1.
    Largest remainder; equal remainders go to the lower index.
    """
    exact = totals[:, None] * (shares / shares.sum(axis=1, keepdims=True))
    counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return counts + (rank < (totals - counts.sum(axis=1))[:, None])

"""Public weights (a, b, c) of the three blocks of noised sums; see noised_sums.py. Imports no PyTorch."""

Blocks = tuple[float, float, float]
"""Weights (a, b, c) of products, sums and counts."""
BLOCKS: Blocks = (0.5, 1.0, 0.2)
UNWEIGHTED: Blocks = (1.0, 1.0, 1.0)

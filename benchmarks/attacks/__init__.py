"""Attacks on finished runs and audits of claims: `python -m perennial.benchmarks.attacks`."""

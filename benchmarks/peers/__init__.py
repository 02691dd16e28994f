"""Other simulators on the workloads of `make bench`: `python -m benchmarks.peers`."""

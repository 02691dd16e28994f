"""Where a figure was measured: the machine and the versions that stand beside it."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def versions(packages: Sequence[str] = ("flwr", "torch", "numpy")) -> dict[str, str]:
    """Installed versions by package."""
    return {package: version(package) for package in packages}


def machine(accelerator: str = "") -> str:
    """Processor, usable cores and memory, Python's version; first the accelerator, where one did the work."""
    cpu = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    for line in facts.read_text().splitlines() if facts.exists() else ():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    # macOS does not say which cores a process may use
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{cpu}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}"
    return f"{accelerator}; {host}" if accelerator else host

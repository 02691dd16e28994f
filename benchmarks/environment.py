"""Where a figure was measured: the machine and the versions that stand beside it."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def versions(packages: Sequence[str] = ("flwr", "torch", "numpy")) -> dict[str, str]:
    """Installed versions by package."""
    return {package: version(package) for package in packages}


def machine() -> str:
    """Processor, usable cores and memory."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, Python {platform.python_version()}"
    )

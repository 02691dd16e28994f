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
    """Processor, cores and system, in words."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}"

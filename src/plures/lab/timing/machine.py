"""Describe this machine; importing this module does not import torch."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """Name the model of the processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def machine() -> dict[str, str | int]:
    """Describe the machine and the versions that measured."""
    import torch

    from plures.version import __version__

    return {
        "plures": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 1,
    }

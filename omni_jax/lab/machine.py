"""Facts about the machine and the software, for reports."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Return versions, the system and the CPU."""
    return {
        "omni-jax": version("omni-jax"),
        "JAX": version("jax"),
        "NumPy": version("numpy"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": _cpu(),
        "CPU cores": os.cpu_count(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.M) if info.exists() else None
    return (found[1] if found else platform.processor()) or "unknown"

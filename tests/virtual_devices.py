"""Tests that need several devices run in a process of their own: their number is fixed when JAX starts.

Such files are called *on_eight_devices.py, so that pytest does not collect them with the others. By hand:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest tests/runtime/text_on_eight_devices.py
"""

import os
import subprocess
import sys
from pathlib import Path

FLAG = "--xla_force_host_platform_device_count="
QUICK = "--xla_backend_optimization_level=0"  # of LLVM: compiling takes a third less, and sharding is decided before


def environment(devices: int = 8) -> dict[str, str]:
    """Of a process that has so many virtual CPU devices."""
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(FLAG)]
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*given, QUICK, f"{FLAG}{devices}"])}


def passes_on_eight_devices(file: Path, *, marked: str = "not full") -> None:
    """Run the tests of a file that have these markers. What pytest reports of a failure is the assertion's message."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marked, str(file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]

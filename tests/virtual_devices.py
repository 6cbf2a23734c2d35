"""Runs tests that need several devices in a separate process, because JAX fixes the number of devices when it starts.

Their files are called on_eight_devices.py, so that pytest does not collect them with the others. To run one directly:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest tests/runtime/on_eight_devices.py
"""

import os
import subprocess
import sys
from pathlib import Path

FLAG = "--xla_force_host_platform_device_count="


def environment(devices: int = 8) -> dict[str, str]:
    """Environment of a process with `devices` virtual CPU devices."""
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(FLAG)]
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*given, f"{FLAG}{devices}"])}


def passes_on_eight_devices(file: Path) -> None:
    """Run the tests of a file. If some fail, the assertion's message is pytest's output."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]

"""The directory in which API server processes share their metrics, as prometheus_client's multiprocess mode has it.

It must be made before prometheus_client is imported, so nothing here imports it.
"""

import os
import shutil
import tempfile

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_PREFIX = "omni-jax-metrics-"


def share_metrics() -> None:
    """From now on, this process and those that it starts keep their metrics in files of a private directory."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix=_PREFIX)


def remove_shared_metrics() -> None:
    """Removes the directory that share_metrics made, if there is one. Processes may still write to their files."""
    directory = os.environ.get(_VARIABLE, "")
    if os.path.basename(directory).startswith(_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)

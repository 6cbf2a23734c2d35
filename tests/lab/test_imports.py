"""The lab and the planner run without the server."""

import subprocess
import sys

MODULES = "omni_jax.lab.run, omni_jax.lab.kv_study_report, omni_jax.planner.experiment, omni_jax.planner.report"


def test_neither_the_server_nor_aiohttp_is_imported():
    code = (
        f"import sys, {MODULES}; print([name for name in sys.modules if name.split('.')[0] in ('aiohttp', 'serving')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("set()\n", 0), result.stderr

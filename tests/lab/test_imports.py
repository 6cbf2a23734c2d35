"""The lab and the planner run without the server."""

import subprocess
import sys

MODULES = "omni_jax.lab.run, omni_jax.lab.kv_study_report, omni_jax.planner.experiment, omni_jax.planner.report"


def test_neither_the_server_nor_aiohttp_is_imported():
    code = f"import sys, {MODULES}; assert not {{'aiohttp', 'serving'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

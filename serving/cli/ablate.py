"""`omni-jax ablate`."""

import json
import logging
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import ExistingFile, PositiveInt

from serving.cli.options import AsJson, LogLevel, Switch
from serving.cli.support import expected_errors, fail, find_custom_functions, interrupted, log_to_stderr, usage_error

EXAMPLE = "omni-jax ablate examples/ablation/two-minute.yaml -o results/"


def ablate(
    experiment: ExistingFile,
    /,
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"))],
    replicas: PositiveInt | None = None,
    router: Literal["round_robin", "least_loaded", "prefix_aware"] | None = None,
    overwrite: Annotated[bool, Switch] = False,
    report_only: Annotated[bool, Switch] = False,
    as_json: AsJson = False,
    log_level: LogLevel = "warning",
) -> int:
    """Compare scheduling policies under the same arrivals, on the real engine or in simulation.

    The same command continues an interrupted run. OUT/report.md has the results.

    Args:
        experiment: YAML file with arms, mixes, rates and seeds.
        out: Directory of the results.
        replicas: Number of replicas behind a router, instead of the file's (in simulation).
        router: What chooses the replica of a request, in all arms, instead of the file's.
        overwrite: Replace results that were made with other settings. Without it, such results are an error.
        report_only: Run nothing; write tables, figures and report of the results that are there.
        as_json: Print one JSON object instead of text.
        log_level: Least severe messages that are logged.
    """
    log_to_stderr(log_level)
    from omni_jax.lab.experiment import load_experiment, with_fleet
    from omni_jax.lab.run import OtherSettings, run_experiment, write_results

    find_custom_functions()
    try:
        loaded = with_fleet(load_experiment(experiment), replicas=replicas, router=router)
    except ValueError as error:
        usage_error(str(error))
    try:
        report = write_results(loaded, out) if report_only else run_experiment(loaded, out, overwrite=overwrite)
    except OtherSettings as error:
        usage_error(str(error))
    except expected_errors() as error:
        logging.getLogger(__name__).debug("ablate failed", exc_info=True)
        fail(str(error))
    except KeyboardInterrupt:
        return interrupted("cells", out / "cells")
    print(json.dumps({"report": str(report)}) if as_json else f"wrote {report}")
    return 0

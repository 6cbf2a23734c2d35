"""Interface of the backends that run a workload: the real engine and the simulation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from omni_jax.lab.experiment import Arm, Experiment
from omni_jax.lab.records import Run
from omni_jax.simulation.workload import Arrival


class Backend(Protocol):
    """Runs one workload at a time."""

    def replay(
        self, arm: Arm, arrivals: Sequence[Arrival], *, tag: str = "", done: Callable[[], None] | None = None
    ) -> Run:
        """Send the arrivals at their times, and return when all requests have ended.

        Args:
            tag: runs with different tags share neither image features nor cached blocks.
            done: called each time a request ends.

        Raises:
            ValueError: a request can never run.
            EngineError: a request failed, so the run is no measurement.
        """
        ...

    def max_running(self, arm: Arm) -> int:
        """Return the maximum number of requests that run at once."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return facts about the machine and the software, for the report."""
        ...

    def step_times(self) -> Mapping[str, Any] | None:
        """Return the measured step times of the baseline, as cost.TableCost.from_json reads them; None if there are
        none."""
        ...


def make_backend(experiment: Experiment, progress: Callable[[str, int, int, str], None] | None = None) -> Backend:
    """Return the experiment's backend.

    Args:
        progress: reports the start of an engine, see omni_jax.progress.stage_bars.
    """
    if experiment.backend == "real":
        from omni_jax.lab.real import RealBackend

        return RealBackend(experiment, progress)
    from omni_jax.lab.simulated import SimulatedBackend

    return SimulatedBackend(experiment)

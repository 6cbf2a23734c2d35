"""What carries out a run: the engine, or a simulation of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from omni_jax.lab.experiment import Arm, Experiment
from omni_jax.lab.records import Run
from omni_jax.simulation.workload import Arrival


class Backend(Protocol):
    """Runs workloads, one at a time."""

    def replay(
        self, arm: Arm, arrivals: Sequence[Arrival], *, tag: str = "", done: Callable[[], None] | None = None
    ) -> Run:
        """Sends the arrivals at their times, and returns when all have ended.

        Args:
            tag: runs with different tags share no features of images and no cached blocks.
            done: called whenever a request has ended.

        Raises:
            ValueError: a request can never run.
        """
        ...

    def most_running(self, arm: Arm) -> int:
        """Requests that run at once."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Of the machine and what runs on it, for the report."""
        ...

    def step_times(self) -> Mapping[str, Any] | None:
        """What steps of the baseline took here, as cost.TableCost.from_json takes it; None where nothing was
        measured."""
        ...


def make_backend(experiment: Experiment, progress: Callable[[str, int, int, str], None] | None = None) -> Backend:
    """The one that the experiment asks for.

    Args:
        progress: of an engine's start, see omni_jax.progress.stage_bars.
    """
    if experiment.backend == "real":
        from omni_jax.lab.real import RealBackend

        return RealBackend(experiment, progress)
    from omni_jax.lab.simulated import SimulatedBackend

    return SimulatedBackend(experiment)

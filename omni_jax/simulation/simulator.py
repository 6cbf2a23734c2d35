"""Simulation of a fleet of replicas behind a router, on one virtual clock.

It models the engine's loop and the order in which a device runs things. It does not model tokenization, the network, or
how host and device slow each other down. Tokens are made up; output_tokens decides when a request ends.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from omni_jax.cost.model import CostModel
from omni_jax.requests import Request
from omni_jax.routing.router import Router, make_router
from omni_jax.segments.deadlines import with_deadlines
from omni_jax.segments.policies import Policy, make_policy
from omni_jax.segments.prompt_view import prompt_view
from omni_jax.simulation.replica import Replica, ReplicaConfig, Step
from omni_jax.simulation.texts import WordTokenizer
from omni_jax.simulation.workload import Arrival, build
from omni_jax.telemetry.recorder import Recorder
from omni_jax.telemetry.records import Record, RequestRecord, SegmentRecord

if TYPE_CHECKING:  # transformers is not imported for a type
    from omni_jax.inputs.prompt import VisionInputs
    from omni_jax.inputs.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The result of a workload. All times are virtual seconds after the start.

    Attributes:
        requests: Records of requests in the order in which they ended.
        segments: Records of segments in the order in which they ended; empty unless requested.
        steps: Steps of the devices in order of dispatch; empty unless requested.
        replica_of: Request id -> index of its replica.
        seconds: When the last request ended.
        busy_seconds: Per replica, seconds in which its device was busy.
    """

    requests: tuple[RequestRecord, ...]
    segments: tuple[SegmentRecord, ...]
    steps: tuple[Step, ...]
    replica_of: Mapping[str, int]
    seconds: float
    busy_seconds: tuple[float, ...]

    @property
    def utilisation(self) -> float:
        """Share of the time in which a device was busy, averaged over replicas."""
        return sum(self.busy_seconds) / len(self.busy_seconds) / self.seconds if self.seconds else 0.0


def simulate(
    arrivals: Iterable[Arrival],
    replica: ReplicaConfig,
    cost: CostModel,
    *,
    replicas: int = 1,
    router: str | Router = "round_robin",
    tokenizer: "Tokenizer | WordTokenizer | None" = None,
    vision: "VisionInputs | None" = None,
    seed: int = 0,
    segments: bool = True,
    timeline: bool = True,
) -> SimulationResult:
    """Run a workload to its end. The same arguments give the same result.

    Args:
        arrivals: The workload, in any order.
        replica: Settings of each replica.
        cost: Predicts durations, for the devices (TableCost of a machine, Roofline of a GPU) and for the schedulers.
        replicas: Number of replicas.
        router: Name in routing.router.ROUTERS, or a Router.
        tokenizer: Tokenizer for the texts. Default: a tokenizer of the made-up words.
        vision: How images become patches; needed if there are images.
        seed: Seed of the noise in step durations, if the replica has any.
        segments, timeline: Whether the result has segments and steps, which take memory.

    Raises:
        InvalidRequest: An arrival does not fit a replica.
        ValueError: There are no replicas, or the router or policy is unknown.
    """
    words = WordTokenizer() if tokenizer is None else tokenizer
    policy = make_policy(replica.segment_policy, allow_custom=True)
    requests = (
        prepare(arrival, words, vision, policy, cost) for arrival in sorted(arrivals, key=lambda arrival: arrival.at)
    )
    return simulate_requests(
        requests,
        replica,
        cost,
        replicas=replicas,
        router=router,
        seed=seed,
        segments=segments,
        timeline=timeline,
    )


def prepare(
    arrival: Arrival,
    tokenizer: "Tokenizer | WordTokenizer",
    vision: "VisionInputs | None",
    policy: Policy,
    cost: CostModel,
) -> Request:
    """The request of an arrival, without pixels, with segments and deadlines, as the engine would take it."""
    request = build(arrival, tokenizer, vision, patches=False)
    segments = policy(prompt_view(request.prompt_ids, request.media, cast("Tokenizer", tokenizer)))
    if request.slo is not None:
        segments = with_deadlines(segments, request.slo, request.arrival, cost, media=request.media)
    return dataclasses.replace(request, segments=segments)


def simulate_requests(
    requests: Iterable[Request],
    replica: ReplicaConfig,
    cost: CostModel,
    *,
    replicas: int = 1,
    router: str | Router = "round_robin",
    seed: int = 0,
    segments: bool = True,
    timeline: bool = True,
) -> SimulationResult:
    """Run `simulate` on requests in order of arrival. Only live requests are kept in memory."""
    if replicas < 1:
        raise ValueError(f"a fleet needs at least one replica, got {replicas}")
    chooser = make_router(router, block_size=replica.block_size) if isinstance(router, str) else router
    ended: list[Record] = []
    steps: list[Step] = []
    recorder = Recorder(segments=segments, sink=ended.append)
    fleet = [
        Replica(index, replica, cost, recorder, seed=seed, on_step=steps.append if timeline else None)
        for index in range(replicas)
    ]
    replica_of: dict[str, int] = {}
    loads = [0] * replicas
    wakes: list[tuple[float, int]] = []  # (time, replica): at most one per replica, none for an idle one
    clock = 0.0
    coming = iter(requests)
    following = next(coming, None)
    while following is not None or wakes:
        before = clock
        if following is not None and (not wakes or following.arrival <= wakes[0][0]):
            clock = following.arrival
            chosen = chooser.route(following, loads)
            idle = fleet[chosen].idle
            fleet[chosen].add(following)
            if idle:
                fleet[chosen].idle = False
                heapq.heappush(wakes, (clock, chosen))
            replica_of[following.id] = chosen
            following = next(coming, None)
        else:
            clock, chosen = heapq.heappop(wakes)
            again = fleet[chosen].wake(clock)
            if again is not None:
                heapq.heappush(wakes, (again, chosen))
        loads[chosen] = fleet[chosen].load
        if not before <= clock < math.inf:
            raise RuntimeError(f"the clock went from {before} to {clock} s: requests must come in order of arrival")
    return SimulationResult(
        requests=tuple(record for record in ended if isinstance(record, RequestRecord)),
        segments=tuple(record for record in ended if isinstance(record, SegmentRecord)),
        steps=tuple(steps),
        replica_of=replica_of,
        seconds=max((record.ended_at for record in ended), default=0.0),
        busy_seconds=tuple(each.busy_seconds for each in fleet),
    )

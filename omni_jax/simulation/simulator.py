"""A fleet of replicas behind a router, on one virtual clock: a heap of when each wants to be woken, and arrivals.

What is modelled is the engine's loop and the order in which a device does things; what is not: tokenising, the network,
and how host and device slow each other down. Tokens are made up, and output_tokens says when a request ends.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from omni_jax.cost import CostModel
from omni_jax.requests import Request
from omni_jax.scheduling.router import Router, make_router
from omni_jax.segments import Policy, make_policy, prompt_view, with_deadlines
from omni_jax.simulation.replica import Replica, ReplicaConfig, Step
from omni_jax.simulation.texts import WordTokenizer
from omni_jax.simulation.workload import Arrival, build
from omni_jax.telemetry.recorder import Recorder
from omni_jax.telemetry.records import Record, RequestRecord, SegmentRecord

if TYPE_CHECKING:  # transformers is not imported for a type
    from omni_jax.inputs import Tokenizer, VisionInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What became of a workload. All times are virtual seconds after the beginning.

    Attributes:
        requests: as they ended.
        segments: as they ended; none unless asked for.
        steps: what the devices did, as it was dispatched; none unless asked for.
        replica_of: by request id.
        seconds: when the last request ended.
        busy_seconds: of each replica's device.
    """

    requests: tuple[RequestRecord, ...]
    segments: tuple[SegmentRecord, ...]
    steps: tuple[Step, ...]
    replica_of: Mapping[str, int]
    seconds: float
    busy_seconds: tuple[float, ...]

    @property
    def utilisation(self) -> float:
        """Share of the time in which a device was busy, on average over replicas."""
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
    """Runs a workload to its end. The same arguments give the same result.

    Args:
        arrivals: in any order.
        replica: how each of them is started.
        cost: how long a device takes (TableCost of a machine, Roofline of a GPU). A scheduler asks it too.
        router: one of scheduling.router.ROUTERS, or an own one.
        tokenizer: of the texts; made-up words without one.
        vision: how images become patches; needed where there are some.
        seed: of the noise in the steps' seconds, if the replica has any.
        segments, timeline: whether the result has them; they take memory.

    Raises:
        InvalidRequest: an arrival that does not fit a replica.
        ValueError: no replicas, an unknown router or policy.
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
    """The request of an arrival without pixels, cut, with deadlines: what Engine would take."""
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
    """`simulate` for requests in order of arrival; no more of them are held at a time than are live."""
    if replicas < 1:
        raise ValueError(f"a fleet needs at least one replica, got {replicas}")
    chooser = make_router(router) if isinstance(router, str) else router
    ended: list[Record] = []
    steps: list[Step] = []
    recorder = Recorder(segments=segments, sink=ended.append)
    fleet = [
        Replica(index, replica, cost, recorder, seed=seed, on_step=steps.append if timeline else None)
        for index in range(replicas)
    ]
    replica_of: dict[str, int] = {}
    loads = [0] * replicas
    wakes: list[tuple[float, int]] = []  # at most one a replica, none for an idle one
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

"""The form of messages on the wire."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.engine.messages import (
    Abort,
    Add,
    Attach,
    ClientGone,
    Decoder,
    Encoder,
    End,
    Failed,
    FromCore,
    Outputs,
    SequenceOutput,
    Stats,
    Status,
    ToCore,
)
from omni_jax.engine.stats import EngineStats
from omni_jax.memory.accounting import PoolUsage
from omni_jax.requests import SLO, MediaSpan, Request, SamplingParams
from omni_jax.requests.segment import MODALITIES, Segment
from omni_jax.telemetry.recorder import Recorder

names = st.text(max_size=20)
small = st.integers(0, 2**31 - 1)


def sent(kind, message):
    """The message after the wire: its frames are copied, as a socket does."""
    return Decoder(kind).decode([bytes(frame) for frame in Encoder().encode(message)])


@st.composite
def requests(draw) -> Request:
    ids = tuple(draw(st.lists(small, min_size=1, max_size=30)))
    shape = draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
    rng = np.random.default_rng(draw(small))
    media = tuple(
        MediaSpan(
            key=draw(st.binary(min_size=1, max_size=32)),
            modality=draw(st.sampled_from(["image", "video"])),
            start=i,
            length=1,
            grid=(2, 2),
            patches=rng.integers(0, 256, (*shape, 3), np.uint8)[:, ::-1],  # not contiguous
        )
        for i in range(draw(st.integers(0, 2)))
    )
    return Request(
        id=draw(names),
        prompt_ids=ids,
        params=SamplingParams(
            temperature=draw(st.floats(0, 2)),
            logit_bias=draw(st.dictionaries(small, st.floats(-100, 100), max_size=3)),
            stop=tuple(draw(st.lists(st.text(min_size=1, max_size=5), max_size=3))),
            stop_token_ids=tuple(draw(st.lists(small, max_size=3))),
            seed=draw(st.integers(-(2**63), 2**63 - 1)),
            max_tokens=draw(st.none() | st.integers(0, 100)),
        ),
        arrival=draw(st.floats(0, 1e9)),
        queued_at=draw(st.none() | st.floats(0, 1e9)),
        media=media,
        positions=draw(st.sampled_from([None, np.arange(3 * len(ids), dtype=np.int32).reshape(3, -1)])),
        segments=tuple(
            Segment(start=i, stop=i + 1, modality=draw(st.sampled_from(MODALITIES)), deadline=draw(st.floats(0)))
            for i in range(draw(st.integers(0, 3)))
        ),
        slo=draw(st.none() | st.builds(SLO, ttft_ms=st.none() | st.floats(1, 1e6), priority=small)),
        cache_salt=draw(names),
        digests=tuple(draw(st.lists(st.binary(min_size=32, max_size=32), max_size=3))),
        forced_ids=tuple(draw(st.lists(small, max_size=3))),
    )


def plain(value):
    """Dataclasses as dictionaries and arrays as bytes, which can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@given(requests())
def test_a_request_arrives_as_it_was_sent(request):
    found = sent(ToCore, Add(request)).request
    assert plain(found) == plain(request)
    assert type(found.prompt_ids) is tuple
    assert type(found.params.logit_bias) is dict


@given(
    st.builds(Abort, st.lists(names))
    | st.builds(ClientGone, small, small)
    | st.just(Attach())
    | st.builds(End, names, small, names, small)
)
def test_messages_to_a_core_arrive_as_they_were_sent(message):
    assert sent(ToCore, message) == message


outputs = st.builds(
    SequenceOutput,
    names,
    small,
    st.none() | small,
    small,
    st.none() | st.binary(),
    st.none() | st.binary(),
    st.sampled_from([None, "stop", "length", "abort", "error"]),
    st.none() | small,
    st.none() | names,
)


@given(
    st.builds(Outputs, st.lists(outputs))
    | st.builds(Status, small, small, st.floats(0, 1e9))
    | st.builds(Failed, names, st.booleans())
)
def test_messages_of_a_core_arrive_as_they_were_sent(message):
    assert sent(FromCore, message) == message


def test_statistics_arrive_as_they_were_sent():
    pool = PoolUsage(
        **{field.name: 1 for field in dataclasses.fields(PoolUsage)}
        | {"active_slots": {"text": 1}, "evictions": {"image": 2}}
    )
    stats = EngineStats(steps=3, pool=pool, step_seconds=(0.5,), prefix_hits={"text": 7})
    message = Stats(stats, Recorder().state())
    assert sent(FromCore, message) == message


def test_what_is_no_message_is_an_error():
    for frames in ([b""], [b"\xc1"], [msgspec.msgpack.encode({"type": "Unknown"})]):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            Decoder(ToCore).decode(frames)

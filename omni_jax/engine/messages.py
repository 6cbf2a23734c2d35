"""What passes between an engine core and its clients, and its form on the wire.

A client is whoever turns requests into messages and outputs into text: an API server, or LLM. A core has one or more
clients, named by their number. Within one process the messages are passed as they are; between processes they are
MessagePack, and arrays travel beside it as frames of their own, without a copy.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from omni_jax.engine.stats import EngineStats
from omni_jax.requests.outputs import FinishReason
from omni_jax.requests.request import Request
from omni_jax.telemetry.recorder import RecorderState

READ_AT_ONCE = 8192  # token ids, which take a quarter of a millisecond


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue a request. It has a seed, its arrival and its segments.

    Attributes:
        prompt_ids: Those of the request on the wire, where it has none. An array can be read in parts, so that the step
            of the receiving core need not wait for a long prompt.
    """

    request: Request
    prompt_ids: np.ndarray | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End requests before the next step. Ids that are not live are ignored."""

    request_ids: list[str]


class End(msgspec.Struct, frozen=True, tag=True):
    """A continuation came to its end in its text: a stop string is complete. Ignored if it has ended.

    Attributes:
        kept: Number of output tokens up to the stop string; the core may have computed a few more.
    """

    request_id: str
    index: int
    stop: str
    kept: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Clear the prefix cache before the next step."""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A client begins to listen, in a new process. It gets Stats."""


class ClientGone(msgspec.Struct, frozen=True, tag=True):
    """The process of a client has ended: abort its requests, those too that are still on their way."""

    client: int
    pid: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the core after the messages before this one."""


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one continuation.

    Attributes:
        request_id, index: The continuation.
        token: The new token; None if there is none.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        logprob: The token's row of the head's result (runtime.functions.head) as bytes, if logprobs are wanted.
        prompt_logprobs: The same for each prompt token but the first, one row after another; in the first output of
            index 0, if they are wanted. A row has only the alternatives that are wanted.
        finish_reason: Set in the last output. With "stop", the token is not part of the text.
        stop_reason: The token id that ended it, if one of stop_token_ids did.
        error: Error message that is safe to show to a client.
    """

    request_id: str
    index: int
    token: int | None = None
    cached_tokens: int = 0
    logprob: bytes | None = None
    prompt_logprobs: bytes | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """New outputs for one client, in the order of their steps."""

    outputs: list[SequenceOutput]


class Status(msgspec.Struct, frozen=True, tag=True):
    """The state of a core, sent when it changes and at least twice a second.

    Attributes:
        waiting: Number of waiting requests, and of messages that the core has not read.
        received: Number of messages that have reached the core from this client.
        stalled: Seconds since the core last made progress, if it hangs; otherwise 0. See EngineCore.patience.
    """

    waiting: int
    received: int
    stalled: float


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The statistics of a core, sent some times a second while it works, and before the outputs that leave it idle. So
    they are exact once all streams have ended.

    Attributes:
        records: Its totals, and the records of requests and segments since the Stats before.
    """

    stats: EngineStats
    records: RecorderState


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The core takes requests."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core has stopped, and its requests are lost. `final`: no other is started in its place."""

    reason: str
    final: bool = True


ToCore = Attach | Add | Abort | End | ResetPrefixCache | ClientGone | Stop
FromCore = Outputs | Status | Stats | Ready | Failed

Frames = list[bytes | memoryview]


class Encoder:
    """Turns messages into frames: MessagePack, then the data of each array."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put_aside)
        self._arrays: list[np.ndarray] = []

    def encode(self, message: ToCore | FromCore) -> Frames:
        """The frames of a message. They may refer to its arrays, which must not change."""
        self._arrays = []
        if isinstance(message, Add):
            ids = np.asarray(message.request.prompt_ids, np.int32)
            message = Add(dataclasses.replace(message.request, prompt_ids=()), ids)
        head = self._encoder.encode(message)
        return [head, *(array.reshape(-1).view(np.uint8).data for array in self._arrays)]

    def _put_aside(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        self._arrays.append(np.ascontiguousarray(value))
        return [value.dtype.str, value.shape, len(self._arrays)]


class Decoder:
    """Turns frames into messages of a type, one of ToCore or FromCore."""

    def __init__(self, kind: Any):
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._take)
        self._frames: Sequence[Any] = ()

    def decode(self, frames: Sequence[Any]) -> Any:
        """The message. Its arrays are views of the frames, and read-only.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: The frames hold no such message.
        """
        self._frames = frames
        message = self._decoder.decode(frames[0])
        if isinstance(message, Add) and message.prompt_ids is not None:
            ids: list[int] = []
            for start in range(0, len(message.prompt_ids), READ_AT_ONCE):
                ids += message.prompt_ids[start : start + READ_AT_ONCE].tolist()
            message = Add(dataclasses.replace(message.request, prompt_ids=tuple(ids)))
        return message

    def _take(self, kind: type, value: Any) -> Any:
        if kind is not np.ndarray:
            raise NotImplementedError(f"cannot receive a {kind.__name__}")
        dtype, shape, frame = value
        return np.frombuffer(self._frames[frame], np.dtype(dtype)).reshape(shape)

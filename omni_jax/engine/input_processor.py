"""What is done to a request before it reaches an engine core: checks, segments, a seed, the time of its arrival."""

import dataclasses
import random
import secrets
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.memory.compression import BadController, Schedule
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.memory.prefix import prompt_digests
from omni_jax.requests import InvalidRequest, MediaSpan, Request
from omni_jax.requests.segment import Segment
from omni_jax.scheduling.limits import output_room
from omni_jax.segments.policies import make_policy
from omni_jax.segments.prompt_view import prompt_view


class InputProcessor:
    """Checks and completes requests for an engine core. Thread-safe.

    Attributes:
        info: The served model and the limits of its engine core.
        tokenizer: The model's tokenizer.
        vision: Settings that turn images into patches; None for a text-only model.
    """

    def __init__(self, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer, vision: VisionInputs | None):
        self.info, self.tokenizer, self.vision = info, tokenizer, vision
        self._policy = make_policy(config.segment_policy, allow_custom=True)
        self._random = random.Random(config.seed)
        self._caches = config.enable_prefix_caching
        self._max_features = EncoderCache(info.encoder_cache_tokens).capacity if vision is not None else 0
        self._schedule = None
        if config.kv_compress_controller is not None:
            self._schedule = Schedule(config.kv_compress_controller, config.kv_compress_ratio)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if the request can never run. Changes nothing."""
        request.params.check_vocabulary(self.info.vocab_size)
        self._drop_shares(request)
        if max(request.prompt_ids) >= self.info.vocab_size or min(request.prompt_ids) < 0:
            raise InvalidRequest(
                f"the prompt has token ids outside the vocabulary (0 to {self.info.vocab_size - 1})", param="prompt"
            )
        if self.vision is not None:
            check_media(request, self.vision, self._max_features, self.info.max_patches)
        elif request.media:
            raise InvalidRequest("this model reads text only, but the request has images", param="messages")

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """Cut a prompt into segments by the engine's policy, or by `policy`; see segments.make_policy.

        Raises:
            ValueError: The policy is unknown.
            InvalidRequest: A custom policy does not cover the prompt.
        """
        chosen = self._policy if policy is None else make_policy(policy)
        return chosen(prompt_view(ids, media, self.tokenizer))

    def process(self, request: Request) -> Request:
        """The request with what it lacks: a seed, the time of its arrival, segments, digests, shares of a custom
        controller. One that has been processed is returned as it is.

        Each request without a seed gets one, so that requests differ and preemption does not change samples. This may
        take a tenth of a second for a long prompt, so a server calls it in a thread.

        Raises:
            InvalidRequest: It can never run.
        """
        if request.processed:
            return request
        self.check(request)
        if request.params.seed is None:
            params = dataclasses.replace(request.params, seed=self._random.getrandbits(63))
            request = dataclasses.replace(request, params=params)
        if not request.arrival:
            request = dataclasses.replace(request, arrival=time.monotonic())
        if not request.segments:
            request = dataclasses.replace(request, segments=self.cut(request.prompt_ids, request.media))
        if not self._caches and request.params.n > 1:  # its continuations share its prompt, and nobody else does
            request = dataclasses.replace(request, cache_salt=secrets.token_hex(16))
        shared = self._caches or request.params.n > 1
        return dataclasses.replace(
            request,
            digests=prompt_digests(request, self.info.block_size) if shared else (),
            drop_shares=self._drop_shares(request),
            processed=True,
        )

    def _drop_shares(self, request: Request) -> np.ndarray | None:
        room = output_room(request, self.info.max_model_len)  # raises if the prompt does not fit
        if self._schedule is None:
            return None
        try:
            return self._schedule.table(room)
        except BadController as error:
            raise InvalidRequest(str(error)) from error


def check_media(request: Request, vision: VisionInputs, max_features: int, max_patches: int) -> None:
    """Raise InvalidRequest if a request's images and placeholders do not match, or an image has more features than the
    encoder cache holds or more patches than the vision tower takes."""
    placeholders = {vision.config.image_token_id: "image", vision.config.video_token_id: "video"}
    at = 0
    for span in request.media:
        expected = vision.config.image_token_id if span.modality == "image" else vision.config.video_token_id
        if not at <= span.start < span.stop <= len(request.prompt_ids) or any(
            token != expected for token in request.prompt_ids[span.start : span.stop]
        ):
            raise InvalidRequest(
                f"the {span.modality} at tokens {span.start} to {span.stop} of the prompt must replace exactly "
                f"{span.length} placeholder tokens",
                param="messages",
            )
        if unmatched := placeholders.keys() & request.prompt_ids[at : span.start]:
            raise _unmatched_placeholder(placeholders[unmatched.pop()])
        at = span.stop
        if span.length > max_features:
            raise InvalidRequest(
                f"an image of {span.length} tokens is larger than the encoder cache, which holds "
                f"{max_features}: send a smaller one, or raise --encoder-cache-tokens",
                param="messages",
            )
        if span.num_patches > max_patches:
            raise InvalidRequest(
                f"an image of {span.num_patches} patches is above the limit of {max_patches}: send a smaller "
                "one, or raise --max-pixels",
                param="messages",
            )
    if unmatched := placeholders.keys() & request.prompt_ids[at:]:
        raise _unmatched_placeholder(placeholders[unmatched.pop()])


def _unmatched_placeholder(modality: str) -> InvalidRequest:
    return InvalidRequest(f"the prompt has {modality} placeholder tokens without {modality} input", param="prompt")

"""An engine without a model, with AsyncEngine's interface and scripted output, one token at a time."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from omni_jax.engine.async_engine import DeltaStream
from omni_jax.engine.stats import EngineStats
from omni_jax.inputs.image import VisionSettings
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.models.config import VisionConfig
from omni_jax.requests import Delta, EngineError, InvalidRequest, Request, TokenLogprob, Unavailable
from omni_jax.requests.segment import Segment
from omni_jax.segments.policies import make_policy
from omni_jax.segments.prompt_view import prompt_view
from omni_jax.telemetry.recorder import Recorder
from tests import tiny, tiny_vl

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{{ style or '' }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeInfo:
    model_dir: str = "/models/fake"
    max_model_len: int = 256
    vocab_size: int = 512
    max_num_seqs: int = 8
    default_sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_blocks: int = 64
    block_size: int = 16
    kv_cache_bytes: int = 4096
    attention: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"decode": "xla", "mixed": "xla", "write": "xla"}
    )
    attention_fallbacks: tuple[str, ...] = ()


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(512), chat_template=template))


def make_vision(tokenizer: Tokenizer) -> VisionInputs:
    """Vision of a tiny Qwen2-VL: a token is 8 x 8 pixels, and an image has 4 to 128 tokens."""
    image, video = (tokenizer.encode(token)[-1] for token in ("<|image_pad|>", "<|video_pad|>"))
    sizes = {"patch_size": tiny_vl.PATCH, "temporal_patch_size": tiny_vl.FRAMES}
    config = VisionConfig(
        **sizes,
        depth=1,
        hidden_size=16,
        intermediate_size=32,
        out_hidden_size=16,
        num_heads=1,
        in_channels=3,
        spatial_merge_size=tiny_vl.MERGE,
        hidden_act="quick_gelu",
        rms_norm=False,
        window_size=None,
        full_attention_layers=(),
        tokens_per_second=None,
        image_token_id=image,
        video_token_id=video,
    )
    settings = VisionSettings(
        **sizes,
        merge_size=tiny_vl.MERGE,
        min_pixels=tiny_vl.MIN_PIXELS,
        max_pixels=tiny_vl.MAX_PIXELS,
        video_min_pixels=tiny_vl.MIN_PIXELS,
        video_max_pixels=tiny_vl.MAX_PIXELS,
        fps=2.0,
        min_frames=2,
        max_frames=8,
        mean=tiny_vl.MEAN,
        std=tiny_vl.STD,
        rescale_factor=1 / 255,
        resample=3,
    )
    return VisionInputs(config=config, settings=settings)


def vision_engine() -> "FakeEngine":
    """An engine for images and videos, with a context long enough for them."""
    engine = FakeEngine(info=FakeInfo(max_model_len=4096))
    backend = tiny_vl.tokenizer(512)
    engine.tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=tiny_vl.CHAT_TEMPLATE))
    engine.vision = make_vision(engine.tokenizer)
    return engine


def answer(request: Request, index: int) -> str:
    """Depends only on the prompt and the choice. Has characters of one, two, three and four bytes."""
    return f"choice {index}: the ďábel 今天 👋 of {sum(request.prompt_ids) % 997}"


def alternatives(position: int, k: int, chosen: int, logprob: float) -> tuple[tuple[int, float], ...]:
    """k pairs, best first; they include the chosen token at even positions only. Some are parts of characters."""
    others = [(3 + (position * 31 + j * 7) % 500, -0.125 * (j + 2)) for j in range(k + 1)]
    pairs = ([(chosen, logprob)] if position % 2 == 0 else []) + [pair for pair in others if pair[0] != chosen]
    return tuple(pairs[:k])


class FakeEngine:
    """An engine with AsyncEngine's interface and scripted output.

    Attributes:
        answers: (request, choice) -> generated text.
        requests: all submitted requests, in order.
        aborted: ids passed to abort.
        gate: event that held choices wait for.
        hold_after: number of tokens after which each choice waits for `gate`.
        fail_after: number of tokens after which a choice ends with an error.
        break_after: number of tokens after which a text cannot be sent, because of a bug.
        logprob: logprob of every generated token.
        queue: maximum number of concurrent requests.
        segment_policy: segment policy of requests that set none.
        cached: request -> number of cached prompt tokens of choice 0; other choices have other numbers.
        resets: number of prefix cache resets.
        recorder: recorder, which tests fill.
        gone: clients that have ended.
        dead: error message of check_health and submit; None for a healthy engine.
    """

    def __init__(self, *, info: FakeInfo | None = None, template: str | None = TEMPLATE):
        self.info = info or FakeInfo()
        self.tokenizer = make_tokenizer(template)
        self.vision: VisionInputs | None = None
        self.answers: Callable[[Request, int], str] = answer
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.hold_after: int | None = None
        self.fail_after: int | None = None
        self.break_after: int | None = None
        self.logprob = -0.25
        self.queue = 64
        self.segment_policy: Any = "request"
        self.cached: Callable[[Request], int] = lambda request: 0
        self.resets = 0
        self.recorder = self.totals = Recorder(segments=True)
        self.dead: str | None = None
        self.started = False
        self.gone: list[int] = []
        self._draining = False
        self._live: dict[str, _Stream] = {}
        self._stats = EngineStats()

    async def start(self) -> None:
        self.started = True

    async def stop(self, *, drain_seconds: float) -> None:
        self._draining = True
        tasks = [task for stream in self._live.values() for task in stream.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=drain_seconds)
        for request_id in list(self._live):
            self._abort(request_id)

    def client_gone(self, client: int, pid: int) -> None:
        self.gone.append(client)

    def check_health(self) -> None:
        if self.dead:
            raise EngineError(self.dead)

    def replica_stats(self) -> tuple[EngineStats, ...]:
        return (self.stats(),)

    def stats(self) -> EngineStats:
        running = sum(not all(task.done() for task in stream.tasks) for stream in self._live.values())
        return dataclasses.replace(self._stats, num_requests_running=running, kv_cache_usage=running / 64)

    def reset_prefix_cache(self) -> None:
        if self.dead:
            raise EngineError(self.dead)
        self.resets += 1

    def cut(self, ids: tuple[int, ...], media: tuple = (), policy: Any = None) -> tuple[Segment, ...]:
        chosen = make_policy(self.segment_policy, allow_custom=True) if policy is None else make_policy(policy)
        return chosen(prompt_view(ids, media, self.tokenizer))

    def process(self, request: Request) -> Request:
        return request

    def check_queue(self) -> None:
        self._check_open()
        if len(self._live) >= self.queue:
            raise Unavailable(f"the queue is full ({self.queue} requests)")

    def _check_open(self) -> None:
        if self.dead:
            raise EngineError(self.dead)
        if self._draining:
            raise Unavailable("the engine is stopping")

    def submit(self, request: Request) -> "_Stream":
        self._check_open()
        if request.id in self._live:
            raise InvalidRequest(f"request id {request.id} is in use")
        self.requests.append(request)
        self._stats.prompt_tokens += len(request.prompt_ids)
        stream = _Stream(request.params.n)
        self._live[request.id] = stream
        choices = range(request.params.n)
        stream.tasks = tuple(asyncio.create_task(self._generate(request, index, stream)) for index in choices)
        return stream

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if stream := self._live.pop(request_id, None):
            for index, task in enumerate(stream.tasks):
                if not task.done():
                    task.cancel()
                    stream.put(Delta(request_id=request_id, index=index, finish_reason="abort"))
                    self._stats.requests_finished["abort"] += 1

    async def _generate(self, request: Request, index: int, stream: "_Stream") -> None:
        params = request.params
        ids = self.tokenizer.encode(self.answers(request, index), add_special_tokens=False)
        limit = params.max_tokens if params.max_tokens is not None else len(ids)
        reason = "stop" if len(ids) <= limit else "length"
        decoder = self.tokenizer.stream(prompt=request.prompt_ids)
        prompt = self._prompt_logprobs(request) if index == 0 and params.prompt_logprobs is not None else None
        offset, held = 0, []
        finish = None
        if limit == 0:
            self._finish(stream, Delta(request_id=request.id, prompt_logprobs=prompt, index=index), "length")
        for position, token in enumerate(ids[:limit]):
            await asyncio.sleep(0)
            if position == self.hold_after:
                await self.gate.wait()
            if position == self.break_after:
                broken = Delta(request_id=request.id, index=index, text=_Broken(), token_ids=(token,))
                self._finish(stream, broken, "stop")
                return
            if position == self.fail_after:
                failed = Delta(request_id=request.id, index=index, error="injected fault")
                self._finish(stream, failed, "error")
                return
            if position == len(ids[:limit]) - 1:
                finish = reason
            text = decoder.push(token) + (decoder.close() if finish else "")
            held.append((position, token, offset))
            self._stats.generation_tokens += 1
            delta = Delta(
                request_id=request.id,
                index=index,
                text=text,
                token_ids=(token,),
                logprobs=self._logprobs(held, params.logprobs) if text else (),
                prompt_logprobs=prompt if position == 0 else None,
                cached_tokens=self.cached(request) + index,
            )
            if text:
                held = []
                offset += len(text)
            if finish:
                self._finish(stream, delta, finish)
            else:
                stream.put(delta)

    def _finish(self, stream: "_Stream", delta: Delta, reason: Any) -> None:
        self._stats.requests_finished[reason] += 1
        stream.put(dataclasses.replace(delta, finish_reason=reason))
        if not stream.unfinished:
            self._live.pop(delta.request_id, None)

    def _logprobs(self, held: list[tuple[int, int, int]], k: int | None) -> tuple[TokenLogprob, ...]:
        if k is None:
            return ()
        return tuple(
            TokenLogprob(
                token_id=token,
                logprob=self.logprob,
                top=alternatives(position, k, token, self.logprob),
                text_offset=offset,
            )
            for position, token, offset in held
        )

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprob | None, ...]:
        entries: list[TokenLogprob | None] = [None]
        for position, token in enumerate(request.prompt_ids[1:], 1):
            top = alternatives(position, request.params.prompt_logprobs or 0, token, self.logprob)
            entries.append(TokenLogprob(token_id=token, logprob=self.logprob, top=top))
        return tuple(entries)


class _Stream(DeltaStream):
    """The deltas of one request, and the tasks that make them, one for each choice."""

    tasks: tuple[asyncio.Task, ...] = ()


class _Broken:
    """No text, because of a bug."""

    def __bool__(self) -> bool:
        raise RuntimeError("secret at /models/fake")

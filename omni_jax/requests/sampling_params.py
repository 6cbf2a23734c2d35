"""How the next token is chosen and when a continuation ends. Names and ranges are vLLM's."""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from omni_jax.requests.errors import InvalidRequest

MAX_LOGPROBS = 20  # width of the top-k that the head computes
MAX_LOGIT_BIAS = 300  # pairs that a slot holds on the device; OpenAI's limit
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096  # of one stop string; as much text may be held back, and is searched with every token
MAX_STOP_TOKEN_IDS = 64  # ids that min_tokens suppresses, EOS included, that a slot holds on the device
MAX_N = 128
# Logits are float32 on the device. Penalised by a factor in this range, those below 1e10 stay below SUPPRESSED's size.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-20, 1e20
GREEDY_TEMPERATURE = 1e-5  # the most likely token is taken at this temperature and below


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of one request. Numbers, booleans and arrays of numpy become Python's.

    Attributes:
        n: Number of continuations of the prompt.
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probabilities sum to top_p; 0 is greedy.
        min_p: Keep tokens at least min_p times as likely as the most likely one.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; from 1e-20 to
            1e20.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted from a token's logit once for each time it occurs in the output.
        logit_bias: Token id -> number added to its logit, each in [-100, 100].
        seed: Requests with the same seed, prompt and parameters draw the same tokens. None draws a fresh seed.
        max_tokens: Maximum number of tokens to generate. None is all that the context leaves; 0 only scores the prompt.
        min_tokens: Number of tokens before which no EOS or stop token is sampled.
        stop: Strings that end the output; they are left out of it unless include_stop_str_in_output.
        stop_token_ids: Token ids that end the output, in addition to the model's EOS ids.
        ignore_eos: Continue after the model's EOS ids.
        logprobs: Number of most likely tokens whose logprobs are returned with the chosen token's. None returns none.
        prompt_logprobs: The same for each prompt token but the first.
        skip_special_tokens: Leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self):
        object.__setattr__(self, "stop", _listed("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", {} if self.logit_bias is None else self.logit_bias)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers, got {type(self.logit_bias).__name__}", param="logit_bias"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS // 2:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS // 2} ids, got {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}", param="logit_bias"
            )
        biases = {_integer("logit_bias", token, 0, None): bias for token, bias in self.logit_bias.items()}
        biases = {token: _number("logit_bias", bias, -100.0, 100.0) for token, bias in biases.items()}
        tokens = tuple(_integer("stop_token_ids", token, 0, None) for token in self.stop_token_ids)
        read = {
            "temperature": _number("temperature", self.temperature, 0.0, 2.0),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
            ),
            "logit_bias": biases,
            "n": _integer("n", self.n, 1, MAX_N),
            "top_k": _integer("top_k", self.top_k, -1, None),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, None),
            "max_tokens": _integer("max_tokens", self.max_tokens, 0, None, optional=True),
            "seed": _integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True),
            "stop_token_ids": tokens,
            "logprobs": _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True),
            "prompt_logprobs": _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "skip_special_tokens": _boolean("skip_special_tokens", self.skip_special_tokens),
            "include_stop_str_in_output": _boolean("include_stop_str_in_output", self.include_stop_str_in_output),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest("stop strings must be non-empty strings", param="stop")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"a stop string may have at most {MAX_STOP_CHARACTERS} characters, got {longest}", param="stop"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, the first of equally likely ones."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_p == 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits are changed before sampling, which needs the head variant `full`."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a token id in the parameters is outside [0, vocab_size)."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequest(
                        f"{name} contains token id {token}, but the vocabulary has {vocab_size} tokens "
                        f"(0 to {vocab_size - 1})",
                        param=name,
                    )


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """The values of a list or an array; none of None, which is vLLM's default."""
    if value is None:
        return ()
    if hasattr(value, "__array__"):
        value = np.asarray(value).tolist()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", param=name)
    return tuple(value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if not _is_a(value, numbers.Real) or not low <= value <= high:  # false for NaN, too
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, got {value!r}", param=name)
    return float(value)


def _integer(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> Any:
    if optional and value is None:
        return None
    if not _is_a(value, numbers.Integral) or value < low or (high is not None and value > high):
        wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise InvalidRequest(f"{name} must be {wanted}, got {value!r}", param=name)
    return int(value)


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequest(f"{name} must be True or False, got {value!r}", param=name)
    return bool(value)

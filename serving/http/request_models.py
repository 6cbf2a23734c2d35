"""Models of the API requests: OpenAI's fields and vLLM's additions.

`fields` says what happens to fields that are not in these models. JSON null means that a field is absent. 4.0 is the
integer 4, as in JSON Schema. Other values are not converted: "1" and true are not numbers, as in OpenAI's API.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from omni_jax.requests import MAX_LOGPROBS, InvalidRequest
from omni_jax.requests.sampling_params import MAX_LOGIT_BIAS, MAX_N, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from omni_jax.requests.slo import SLO
from serving.http import strict_json
from serving.http.errors import bounded_repr
from serving.http.fields import check_endpoint, check_refused, unknown_fields

MAX_PROMPTS = 2048  # prompts in one /v1/completions request
MAX_CHOICES = 8192  # prompts times n
MAX_MESSAGES = 2**18  # before they are validated; the context has a lower limit, see chat_bounds
MAX_TOOLS = 2**14
MAX_POLICY_SIZE = 16384  # characters of a segment policy as JSON; 64 named regions take about 4,000
MAX_CACHE_SALT = 512  # characters

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Preprocessing option of images and videos that a request may set -> type of its value.
PROCESSOR_OPTIONS: dict[str, type] = {"min_pixels": int, "max_pixels": int, "fps": float, "num_frames": int}


def integer(value: Any) -> Any:
    """4.0 as 4; JSON has one type for both. Anything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def integers(value: Any) -> Any:
    """A list with each item as an `integer`. Anything else as it is."""
    return [integer(item) for item in value] if isinstance(value, list) and float in map(type, value) else value


Integer = Annotated[int, BeforeValidator(integer)]


def at_most(limit: int) -> BeforeValidator:
    """Refuses a longer list. pydantic validates, and copies, all items before it looks at their number."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > limit:
            raise ValueError(f"must have at most {limit} items, got {len(value)}")
        return value

    return BeforeValidator(check)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _check_string_or_list(value: Any) -> Any:
    """Replaces pydantic's check of a union: one clear error, and a length limit before a long list is validated."""
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value[: MAX_STOP_STRINGS + 1]):
        raise ValueError("must be a string or a list of strings")
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {MAX_STOP_STRINGS} strings, got {len(value)}")
    return value


def _check_policy(value: Any) -> Any:
    """Checks type and size; make_policy checks the content later."""
    if value is not None and not isinstance(value, (str, dict)):
        raise ValueError("must be a policy's name or an object")
    if value is not None and (size := len(json.dumps(value))) > MAX_POLICY_SIZE:
        raise ValueError(f"must have at most {MAX_POLICY_SIZE} characters as JSON, got {size}")
    return value


_OBJECTIVES = ("ttft_ms", "tpot_ms", "e2e_ms", "priority")


class GenerationRequest(_Strict):
    """Fields of every endpoint that generates text."""

    prompt_field: ClassVar[str] = "prompt"  # name of the field that holds the prompt, for errors
    default_max_tokens: ClassVar[int | None] = None  # None: the rest of the context

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(_check_string_or_list)] = None
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS), BeforeValidator(integers)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_N)] | None = None
    priority: Integer | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    segment_policy: Annotated[str | dict[str, Any] | None, BeforeValidator(_check_policy)] = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        self.slo()
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(
                f"best_of is not supported yet unless it equals n, got {self.best_of}", param="best_of"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def slo(self) -> SLO | None:
        """The request's objectives, or None if it sets none and the server's defaults apply.

        Raises:
            InvalidRequest: an objective is out of range.
        """
        given = {name: value for name in _OBJECTIVES if (value := getattr(self, name)) is not None}
        return SLO(**given) if given else None

    def without_media(self) -> Self:
        """The request without its images and videos, which must not stay in memory while it runs."""
        return self

    def requested_tokens(self) -> tuple[str, int | None]:
        """The field that limits the number of generated tokens, and its value; None if the request leaves it out."""
        return "max_tokens", self.max_tokens

    def requested_logprobs(self) -> tuple[int | None, int | None]:
        """(logprobs, prompt_logprobs) for SamplingParams."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: Any = None  # validated in prompts(), because a pydantic union would collect one error per token
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def requested_logprobs(self) -> tuple[int | None, int | None]:
        for_prompt = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        return self.logprobs, max(for_prompt, default=None)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids.

        Raises:
            InvalidRequest: prompts are absent, empty, of a wrong type, or too many.
        """
        given = integers(self.prompt)
        if isinstance(given, str) or (isinstance(given, list) and given and _is_token_list(given)):
            given = [given]
        if not isinstance(given, list):
            raise InvalidRequest(f"prompt must be {_PROMPT_TYPES}, got {bounded_repr(given)}", param="prompt")
        if len(given) > MAX_PROMPTS or len(given) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"a request may have at most {MAX_PROMPTS} prompts and {MAX_CHOICES} choices, "
                f"got {len(given)} prompts with n {self.n or 1}",
                param="prompt",
            )
        if not given or not all(given):
            raise InvalidRequest("prompt must not be empty: send at least one token", param="prompt")
        given = [integers(prompt) for prompt in given]
        texts = all(isinstance(prompt, str) for prompt in given)
        if not texts and not all(isinstance(prompt, list) and _is_token_list(prompt) for prompt in given):
            raise InvalidRequest(f"prompt must be {_PROMPT_TYPES}, got {bounded_repr(given)}", param="prompt")
        return given


_PROMPT_TYPES = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def _is_token_list(value: list) -> bool:
    return all(type(token) is int for token in value)


class ToolFunction(_Strict):
    name: Annotated[str, Field(min_length=1)]


class Tool(_Strict):
    type: str
    function: ToolFunction


class Conversation(_Strict):
    """Fields that the chat template renders. `omni_jax.inputs` validates the messages."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None  # [] asks for nothing
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_template_fields(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                f"tool_choice must be 'none'; {bounded_repr(self.tool_choice)} is not supported yet",
                param="tool_choice",
            )
        if self.tool_choice == "auto" and not self.tools:
            raise InvalidRequest("tool_choice is only allowed with tools", param="tool_choice")
        if self.parallel_tool_calls is False and not self.tools:
            raise InvalidRequest("parallel_tool_calls is only allowed with tools", param="parallel_tool_calls")
        return self

    def template_arguments(self, body: Mapping[str, Any], *, reads: Callable[[str], bool]) -> dict[str, Any]:
        """Keyword arguments of `Tokenizer.render_chat`.

        Args:
            body: the JSON body, for the tools as the client sent them: `Tool` keeps only some of their fields.
            reads: whether the chat template reads a variable.

        Raises:
            InvalidRequest: the chat template has no use for reasoning_effort.
        """
        kwargs = dict(self.chat_template_kwargs or {})
        if (effort := self.reasoning_effort) is not None:
            # As in vLLM, which also switches thinking on or off for templates that know no efforts.
            chosen = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            chosen = {name: value for name, value in chosen.items() if reads(name)}
            if not chosen and effort != "none":
                raise InvalidRequest(
                    f"reasoning_effort {effort!r} has no effect on this model: its chat template reads neither "
                    "reasoning_effort nor enable_thinking; leave it out",
                    param="reasoning_effort",
                )
            kwargs = chosen | kwargs
        continues = bool(self.continue_final_message)
        prompts = self.add_generation_prompt
        return {
            "add_generation_prompt": not continues if prompts is None else prompts,
            "continue_final_message": continues,
            "tools": body["tools"] if self.tools and self.tool_choice != "none" else None,
            "template_kwargs": kwargs or None,
        }


class ChatRequest(GenerationRequest, Conversation):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Integer | None = None

    @model_validator(mode="after")
    def _check_chat_fields(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest(
                "tools are not supported yet: this server does not find tool calls in the model's text; leave tools "
                "out, or send tool_choice 'none' with them",
                param="tools",
            )
        return self

    def without_media(self) -> Self:
        return self.model_copy(update={"messages": []})

    def requested_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def requested_logprobs(self) -> tuple[int | None, int | None]:
        return (self.top_logprobs or 0) if self.logprobs else None, self.prompt_logprobs


class TokenizeRequest(_Strict):
    """POST /tokenize with a `prompt`."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(Conversation):
    """POST /tokenize with `messages`."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True), BeforeValidator(integers)]


_PATHS: dict[type[BaseModel], str] = {CompletionRequest: "/v1/completions", ChatRequest: "/v1/chat/completions"}


def _other_endpoint(kind: type[BaseModel]) -> type[BaseModel]:
    return ChatRequest if kind is CompletionRequest else CompletionRequest


def ignored_fields(kind: type[BaseModel], body: Mapping[str, Any]) -> list[str]:
    """Fields of an endpoint's body that no endpoint knows."""
    return unknown_fields(body, kind.model_fields.keys() | _other_endpoint(kind).model_fields.keys())


R = TypeVar("R", bound=BaseModel)


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        InvalidRequest: the body is not a JSON object.
    """
    body = strict_json.loads(raw)
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {bounded_repr(body)}")
    return body


def validate(kind: type[R], body: dict[str, Any]) -> R:
    """`body` as a `kind`. Raises InvalidRequest for the first field that is invalid or not supported."""
    check_refused(body, kind.model_fields)
    if kind in _PATHS:
        other = _other_endpoint(kind)
        check_endpoint(body, kind.model_fields, other.model_fields, path=_PATHS[other])
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), InvalidRequest):  # raised in a validator above
            raise cause from None
        where = first["loc"]
        path = ".".join(str(step) for step in where if not (isinstance(step, str) and "[" in step))
        message = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] in ("missing", "value_error") else f", got {bounded_repr(first['input'])}"
        raise InvalidRequest(f"{path}: {message}{given}", param=str(where[0]) if where else None) from None


def processor_options(
    given: Mapping[str, Any], *, where: str, param: str, known: Collection[str] = PROCESSOR_OPTIONS
) -> dict[str, int | float]:
    """The options in `given` that are not null. The server's limits are checked later.

    Args:
        where: path of `given` in the request, for errors.
        param: the request's field that contains `given`.
        known: the allowed ones of PROCESSOR_OPTIONS.

    Raises:
        InvalidRequest: an option is unknown, or its value is not a positive number.
    """
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if name not in known:
            raise InvalidRequest(
                f"{where} has the unknown option {bounded_repr(name)}; known here are {', '.join(known)}", param=param
            )
        whole = PROCESSOR_OPTIONS[name] is int
        if whole:
            options[name] = value = integer(value)
        if type(value) not in ((int,) if whole else (int, float)) or not 0 < value < float("inf"):
            kind = "a whole number" if whole else "a number"
            raise InvalidRequest(f"{where}.{name} must be {kind} above 0, got {bounded_repr(value)}", param=param)
    return options

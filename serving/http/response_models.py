"""The API responses. A field that is UNSET is not serialized, because absent and null differ."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Token counts. As in OpenAI, prompt_tokens_details is always present; without a prefix cache it is 0."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ResponseHead(Struct, kw_only=True):
    """Fields with which a response and each chunk of a stream begin."""

    id: str
    object: str
    created: int
    model: str


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[ChatLogprob]


class PromptLogprob(Struct, kw_only=True):
    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(ResponseHead, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class ChatDelta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(ResponseHead, kw_only=True):
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET


class CompletionLogprobs(Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """A whole choice, or an addition to it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(ResponseHead, kw_only=True):
    """A whole response, or a chunk of a stream."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any]


class ModelList(Struct, kw_only=True):
    object: str
    data: list[ModelCard]


class Tokenized(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct, kw_only=True):
    prompt: str


class Version(Struct, kw_only=True):
    version: str

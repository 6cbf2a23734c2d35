"""Models of the API responses. Only fields that were set are serialized, because absent and null differ."""

from typing import Any

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Token counts. As in OpenAI, prompt_tokens_details is always present; without a prefix cache it is 0."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ResponseHead(BaseModel):
    """Fields with which a response and each chunk of a stream begin."""

    id: str
    object: str
    created: int
    model: str


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class PromptLogprob(BaseModel):
    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ChatMessage(BaseModel):
    role: str
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(ResponseHead):
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(BaseModel):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class ChatChunk(ResponseHead):
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A whole choice, or an addition to it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(ResponseHead):
    """A whole response, or a chunk of a stream."""

    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any]


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str

"""The inputs of a call of LLM that takes many: what was read of them, what runs, and what has ended."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from omni_jax.engine.partial_output import PartialOutput, TokenIds
from omni_jax.inputs.prompt import Prompt
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import Completion, Delta, InvalidRequest, Request, RequestOutput, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A prompt, and its text if there is one."""

    prompt: Prompt
    text: str | None


@dataclasses.dataclass(kw_only=True)
class Call:
    """A call of generate, chat or score. It holds no more of an input than it must: first the input as it was given,
    then perhaps what was read, then the output while it grows, then the result.

    Attributes:
        name: name of the items, for messages.
        items: the inputs.
        params: sampling parameters of each.
        read: reads an input.
        result: makes what is returned for an input from its output.
        arrival: when the call began.
        tokenizer: gives the texts of tokens in log-probabilities.
        token_ids: makes tuples of token ids.
        names: numbers for ids of requests.
        prompts: inputs that were read and have not begun to run; None for others.
        running: outputs of inputs that are in the engine, by index.
        results: results of those that have ended, by index.
        unfinished: number of continuations in the engine.
        finished: number of inputs that came to their end.
        tokens: number of tokens generated.
    """

    name: str
    items: Sequence[Any]
    params: list[SamplingParams]
    read: Callable[[Any], Rendered]
    result: Callable[[RequestOutput], Any]
    arrival: float
    tokenizer: Tokenizer
    token_ids: TokenIds
    names: "itertools.count[int]"
    prompts: list[Rendered | None] = dataclasses.field(init=False)
    running: dict[int, PartialOutput] = dataclasses.field(default_factory=dict)
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    unfinished: int = 0
    finished: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.prompts = [None] * len(self.items)

    def begin(self, index: int, request: Request, text: str | None) -> None:
        """Note that an input is in the engine. `text` is that of the prompt."""
        self.running[index] = PartialOutput(request.id, request.prompt_ids, request.params, text)
        self.unfinished += request.params.n

    def take(self, index: int, delta: Delta) -> None:
        """Add a delta to an output. The last one ends it."""
        partial = self.running[index]
        partial.take(delta)
        self.tokens += len(delta.token_ids)
        self.unfinished -= delta.finish_reason is not None
        if not partial.unfinished:
            del self.running[index]
            self._end(index, partial.output(self.tokenizer, self.token_ids))

    def refuse(self, index: int, text: str | None, error: InvalidRequest) -> None:
        """Note that the engine cannot run an input, before or after it has begun."""
        if (partial := self.running.pop(index, None)) is not None:
            self.unfinished -= partial.unfinished
        none = Completion(index=0, text="", token_ids=(), logprobs=None, finish_reason="error")
        output = RequestOutput(
            request_id=self._name(),
            prompt=text,
            prompt_ids=(),
            prompt_logprobs=None,
            outputs=(none,),
            error=self.labelled(index, error),
        )
        self._end(index, output)

    def labelled(self, index: int, error: InvalidRequest) -> str:
        """The error with the place of its input, if there are several."""
        return f"{self.name}[{index}]: {error}" if len(self.items) > 1 else str(error)

    def outputs(self, failure: str | None = None) -> list[Any]:
        """The results of all inputs. `failure` is the error of those that have not ended; if it is None, they were
        interrupted."""
        return [
            self.results[index] if index in self.results else self.result(self._unfinished(index, failure))
            for index in range(len(self.items))
        ]

    def _unfinished(self, index: int, failure: str | None) -> RequestOutput:
        partial = self.running.get(index)
        if partial is None:  # it has not begun, and may not have been read
            item, rendered = self.items[index], self.prompts[index]
            ids, text = (
                ((), item if isinstance(item, str) else None)
                if rendered is None
                else (
                    rendered.prompt.ids,
                    rendered.text,
                )
            )
            partial = PartialOutput(self._name(), ids, self.params[index], text)
        return partial.output(self.tokenizer, self.token_ids, failure)

    def _name(self) -> str:
        return f"llm-{next(self.names)}"

    def _end(self, index: int, output: RequestOutput) -> None:
        self.results[index] = self.result(output)
        self.finished += output.finished

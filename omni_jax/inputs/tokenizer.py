"""Text and messages -> token ids, token ids -> text, for a Hugging Face model directory. Local files only."""

import inspect
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

# On import transformers advises to install PyTorch, which this engine never uses.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import PreTrainedTokenizerFast

from omni_jax.inputs.chat import clean_text, map_strings, normal_messages
from omni_jax.inputs.control_tokens import ControlTokens
from omni_jax.inputs.token_bytes import TextStream, TokenBytes
from omni_jax.requests import InvalidRequest, MediaModality

# What template_kwargs cannot name: arguments of the call that renders, and variables that come from elsewhere.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {
    "messages",
    "kwargs",
}
# What a template can raise over data it did not foresee, besides jinja2's own errors.
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Tokenizer:
    """Encoding, decoding and chat templates of one model. Safe to share between threads: nothing in it changes.

    Attributes:
        vocab_size: tokens in the vocabulary, added ones included.
        special_ids: ids of the special (control) tokens.
        eos_token_id: the tokenizer's own end of sequence, or None; generation_config.json may name more.
        has_chat_template: whether render_chat can be used.
        media_slots: what the chat template writes a slot for where it is given a part of that kind.
    """

    def __init__(self, hf: PreTrainedTokenizerFast):
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()  # set once, here: changing it while others encode is the classic fault
        self._backend.no_padding()
        rule = TokenBytes.of(self._backend)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self._bytes = [b""] * (max(vocab.values()) + 1)  # by id; read once here, since each generated token asks
        for token, i in vocab.items():
            self._bytes[i] = rule(token)
        self._leading_spaces = rule.leading_spaces
        self._control = ControlTokens(self._backend)
        self.vocab_size = len(vocab)
        self.special_ids = frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special)
        self.eos_token_id = hf.eos_token_id if isinstance(hf.eos_token_id, int) else None
        self.has_chat_template = bool(hf.chat_template)
        kinds: tuple[MediaModality, ...] = ("image", "video")
        self.media_slots = frozenset(kind for kind in kinds if self._slots({"type": kind}) > self._slots())

    @property
    def has_media_slots(self) -> bool:
        """Whether the chat template is for a model that reads images or video."""
        return bool(self.media_slots)

    @classmethod
    def from_directory(cls, path: str | Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Reads tokenizer.json, and what beside it holds special tokens and the chat template.

        tokenizer.json is taken as it is; the class that tokenizer_config.json names is not used, because several of
        those build their own pre-tokenizer from the vocabulary (SmolLM2's digits would be lost).

        Args:
            chat_template: replaces the model's own; Jinja text, or the path of a file that holds it.

        Raises:
            FileNotFoundError: no tokenizer.json there, or no such template file.
            ValueError: files that cannot be read, a vocabulary of an unknown family, a template with a syntax error.
        """
        path = Path(path)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"no tokenizer.json in {path}; expected a model directory in Hugging Face layout, tokenizer included"
            )
        try:
            json.loads((path / "tokenizer.json").read_bytes())  # the library's own error names neither file nor cause
        except ValueError as error:
            raise ValueError(f"{path / 'tokenizer.json'} is not whole JSON (truncated?): {error}") from error
        hf = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        if chat_template is not None:
            hf.chat_template = _template_text(chat_template)
        elif not hf.chat_template:
            hf.chat_template = _processors_template(path)
        try:
            if hf.chat_template:  # compiles it, and a misspelt one is found now instead of with each request
                hf.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS):
            pass  # it may want a system message, or tools; that is between it and its clients
        return cls(hf)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Spellings of special tokens in it become special tokens, as in vLLM's /v1/completions:
        a raw prompt is written by the caller as the model shall see it. Text of a chat goes through render_chat.

        Raises InvalidRequest for an unpaired surrogate.
        """
        return self._backend.encode(clean_text(text, "prompt"), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids: the UTF-8 reading of their bytes, less the leading space a SentencePiece text begins with.

        Equal to what the stream gives in pieces, and to the tokenizers library, whose byte-fallback decoder alone
        differs: it gives one U+FFFD for each byte of a run with a fault in it, the sound characters included.
        """
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.close()])

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A fresh incremental decoder: decode, a token at a time."""

        def bytes_of(token_id: int) -> bytes:
            return b"" if skip_special_tokens and token_id in self.special_ids else self.token_bytes(token_id)

        return TextStream(bytes_of, leading_spaces=self._leading_spaces)

    def token_text(self, token_id: int) -> str:
        """One token's text by itself, special tokens spelt out; bytes that are no whole character are U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, special tokens spelt out; b"" for an id that is not in the vocabulary.

        The bytes of generated tokens, one after another, are the UTF-8 of their text (SentencePiece: before the one
        leading space is taken off).
        """
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        modalities: Collection[MediaModality] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, through the chat template. Special tokens stand only where the template puts
        them: their spellings in messages, tools and template_kwargs are encoded as plain text. So are those of the
        placeholders of media, each of which stands for a part that was given.

        Args:
            messages: OpenAI message objects; see chat.normal_messages for what is accepted.
            modalities: what the model reads besides text; the template gets lists of parts then.
            add_generation_prompt: end with the beginning of an assistant's turn.
            continue_final_message: leave the last message open, so that the model goes on with it; excludes
                add_generation_prompt.
            tools: OpenAI tool objects.
            template_kwargs: further variables of the template.

        Raises:
            InvalidRequest: see normal_messages; an unpaired surrogate; no template; the template refuses or fails.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                param="continue_final_message",
            )
        if reserved := sorted(_RESERVED & set(template_kwargs or ())):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {', '.join(reserved)}: set elsewhere", param="chat_template_kwargs"
            )
        nonce = self._control.nonce()

        def hidden(value: Any, param: str) -> Any:
            return map_strings(value, lambda text: self._control.hide(clean_text(text, param), nonce), param=param)

        conversation = hidden(normal_messages(messages, modalities=modalities), "messages")
        schemas = hidden(tools or None, "tools")
        variables = hidden(dict(template_kwargs or {}), "chat_template_kwargs")
        try:
            rendered = self._hf.apply_chat_template(
                conversation,
                tools=schemas,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            reason = self._control.reveal((str(error).splitlines() or [type(error).__name__])[0], nonce)
            raise InvalidRequest(
                f"the chat template cannot render these messages: {reason}", param="messages"
            ) from error
        return self._control.encode(str(rendered), nonce)

    def _slots(self, *media: Mapping[str, str]) -> int:
        """How many added tokens the template writes for one message of a text and these parts; -1 if it cannot. A
        template for text only may well print the list of parts, but that is no token more."""
        if not self.has_chat_template:
            return -1
        message: Any = {"role": "user", "content": [{"type": "text", "text": "Hello"}, *media]}
        try:
            rendered = self._hf.apply_chat_template([message], tokenize=False)
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS):
            return -1
        added = self._backend.get_added_tokens_decoder().keys()
        return sum(i in added for i in self._backend.encode(str(rendered), add_special_tokens=False).ids)


def _template_text(given: str) -> str:
    if "{" in given or "\n" in given:  # every template has a brace, hardly a path does
        return given
    if not Path(given).is_file():
        raise FileNotFoundError(f"chat_template is neither Jinja text (it has no brace) nor a file: {given}")
    return Path(given).read_text(encoding="utf-8")


def _processors_template(path: Path) -> str | None:
    """The template Qwen2-VL's directories keep in a file of its own, for the processor: {"chat_template": text}."""
    file = path / "chat_template.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise ValueError(f'{file} must hold {{"chat_template": "..."}}')
    return template

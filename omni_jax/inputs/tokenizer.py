"""The tokenizer and chat template of a Hugging Face model directory. Reads local files only."""

import inspect
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

# Suppresses transformers' advice to install PyTorch, which this engine does not use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from omni_jax.inputs.chat import clean_text, map_strings, normal_messages
from omni_jax.inputs.chat_bounds import check_items, check_size
from omni_jax.inputs.chat_templates import TEMPLATE_ERRORS, find_template, render, template_form
from omni_jax.inputs.control_tokens import ControlTokens
from omni_jax.inputs.token_bounds import count_unlocked, encode_unlocked, exceeds, max_token_bytes, too_long
from omni_jax.inputs.token_bytes import TextStream, TokenBytes
from omni_jax.requests import InvalidRequest, MediaModality

logger = logging.getLogger(__name__)

MAX_TOKEN_ID = 2**24  # far above any published vocabulary; a table of all ids is kept
# Names that template_kwargs cannot set: arguments of the functions that render, and variables set elsewhere.
_RENDERING = (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template, render)
_RESERVED = frozenset().union(*(inspect.signature(function).parameters for function in _RENDERING)) | {"messages"}


class Tokenizer:
    """Encoding, decoding and chat template of one model. Threads can share it.

    Attributes:
        vocab_size: number of tokens in the vocabulary, including added ones.
        max_token_id: largest id of the vocabulary without added tokens, of which some checkpoints have too many.
        special_ids: ids of the special (control) tokens.
        eos_token_id: the tokenizer's end-of-sequence token, or None; generation_config.json may list more.
        has_chat_template: whether render_chat can be used.
        template_modalities: the modalities that the chat template writes placeholders for.
    """

    def __init__(self, hf: PreTrainedTokenizerFast):
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()  # set once, here: changing it is not safe while other threads encode
        self._backend.no_padding()
        rule = TokenBytes.from_tokenizer(self._backend)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        if not vocab or max(vocab.values()) > MAX_TOKEN_ID:
            raise ValueError(
                f"tokenizer.json must have tokens with ids from 0 to {MAX_TOKEN_ID:,}, the largest of its {len(vocab)} "
                f"tokens is {max(vocab.values(), default=None)}"
            )
        added = self._backend.get_added_tokens_decoder()
        self._bytes = [b""] * (max(vocab.values()) + 1)  # by id, computed once: every generated token looks its own up
        for i in vocab.values():
            # The id's own string: a normalized added token takes the space before it, which get_vocab does not show.
            self._bytes[i] = rule(self._backend.id_to_token(i) or "", added=i in added)
        self._leading_spaces = rule.leading_spaces
        self._max_token_bytes = max_token_bytes(self._backend)
        self._control = ControlTokens(self._backend)
        self._bos = self._backend.encode("").ids[:1]  # what the tokenizer adds before a text, if anything
        self._logged_bos = False
        self.vocab_size = len(vocab)
        self.max_token_id = max(self._backend.get_vocab(with_added_tokens=False).values(), default=0)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_token_id = hf.eos_token_id if isinstance(hf.eos_token_id, int) else None
        self.has_chat_template = bool(hf.chat_template)
        # A template for tools may differ from the one without.
        self._forms = {
            with_tools: template_form(partial(render, hf), with_tools=with_tools)
            for with_tools in ((False, True) if hf.chat_template else ())
        }
        kinds: tuple[MediaModality, ...] = ("image", "video")
        placeholders = self._count_added_tokens
        self.template_modalities = frozenset(kind for kind in kinds if placeholders({"type": kind}) > placeholders())

    @classmethod
    def from_directory(
        cls, path: str | Path, *, chat_template: str | None = None, has_tower: bool = False
    ) -> "Tokenizer":
        """Read tokenizer.json, and the files beside it with special tokens and the chat template.

        tokenizer.json is used as it is, without the class that tokenizer_config.json names: several of those classes
        replace the pre-tokenizer by their own, and SmolLM2 would lose its splitting of digits.

        Args:
            chat_template: replaces the model's chat template; Jinja text, or the path of a file that holds it.
            has_tower: whether the model reads images; its processor's chat template is used then.

        Raises:
            FileNotFoundError: there is no tokenizer.json, or no such template file.
            ValueError: a file cannot be parsed, the vocabulary is of an unsupported family, or the template has a
                syntax error.
        """
        path = Path(path)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"no tokenizer.json in {path}; expected a model directory in Hugging Face layout, tokenizer included; "
                "--tokenizer names another directory for it"
            )
        try:
            json.loads((path / "tokenizer.json").read_bytes())  # the library's error has neither file nor cause
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path / 'tokenizer.json'} is not valid JSON (truncated?): {error}") from error
        try:
            hf = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(
                f"tokenizer.json, or a file beside it such as tokenizer_config.json, is not a tokenizer's: {error}"
            ) from error
        hf.chat_template = template = find_template(path, hf.chat_template, given=chat_template, has_tower=has_tower)
        for text in template.values() if isinstance(template, dict) else [template] if template else []:
            try:  # compile it now, so that a syntax error fails the start and not every request
                render(hf, [{"role": "user", "content": "Hello"}], template=text)
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(
                    f"the chat template has a syntax error in line {error.lineno}: {error.message}"
                ) from error
            except (jinja2.TemplateError, *TEMPLATE_ERRORS):
                pass  # the template may require a system message or tools, which this test does not have
        return cls(hf)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Encode a raw prompt. Other threads run meanwhile.

        Spellings of special tokens become special tokens, as in vLLM's /v1/completions. Use render_chat for messages.

        Args:
            max_tokens: refuse a text that certainly has more tokens, before all of it is encoded; see `exceeds`.

        Raises:
            InvalidRequest: the text has an unpaired surrogate, or is refused.
        """
        text = clean_text(text, "prompt")
        if max_tokens is not None and self.exceeds(text, max_tokens):
            raise too_long(len(text), max_tokens, "prompt")
        ids = encode_unlocked(self._backend, text, add_special_tokens=add_special_tokens)
        if add_special_tokens and not self._logged_bos and self._bos and ids[:2] == 2 * self._bos:
            self._logged_bos = True
            logger.warning(
                "a prompt begins with %r, and the tokenizer adds another: the prompt begins with two, which a model "
                "does not expect. Leave it out, or set add_special_tokens to false. This is logged once.",
                self.token_text(ids[0]),
            )
        return ids

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a text certainly has more tokens than this. False if it has more, but not twice as many."""
        count = partial(count_unlocked, self._backend)
        return exceeds(clean_text(text), max_tokens, max_bytes=self._max_token_bytes, count=count)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids: the UTF-8 text of their bytes, without SentencePiece's leading space.

        Equal to the concatenated output of `stream`, and to the tokenizers library except for its byte-fallback
        decoder: that turns every byte of a run with an invalid one into U+FFFD, valid characters included.
        """
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.close()])

    def prompt_text(self, prompt: Sequence[int], output: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """`decode` of a prompt, without a last character that the output's first bytes continue: it is output."""
        text = self.decode(prompt, skip_special_tokens=skip_special_tokens)
        if not text.endswith("\ufffd"):
            return text
        stream = self.stream(skip_special_tokens=skip_special_tokens, prompt=prompt)
        for token in output:
            stream.push(token)
        return text[:-1] if stream.joined else text

    def stream(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> TextStream:
        """Create an incremental decoder: `decode`, one token at a time.

        Args:
            prompt: token ids that the stream continues: its text is `decode` of all tokens, less that of the prompt.
        """

        def bytes_of(token_id: int) -> bytes:
            return b"" if skip_special_tokens and token_id in self.special_ids else self.token_bytes(token_id)

        return TextStream(bytes_of, leading_spaces=self._leading_spaces, prompt=prompt)

    def split_specials(self, text: str) -> list[str | int]:
        """The text with the ids of special tokens in place of their spellings."""
        return self._control.split(text)

    def token_text(self, token_id: int) -> str:
        """The text of one token, special tokens included; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens included; b"" for an id outside the vocabulary.

        The concatenated bytes of generated tokens are the UTF-8 encoding of their text (SentencePiece: with the leading
        space).
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
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode a conversation through the chat template.

        Only the template can write special tokens and media placeholders: their spellings in messages, tools and
        template_kwargs are encoded as plain text.

        Args:
            messages: OpenAI message objects; see chat.normal_messages.
            modalities: what the model reads besides text; if not empty, the template gets content as lists of parts.
            add_generation_prompt: end with the beginning of an assistant turn.
            continue_final_message: leave the last message open for the model to continue; excludes
                add_generation_prompt.
            tools: OpenAI tool objects.
            template_kwargs: additional variables for the template.
            max_tokens: refuse a conversation that certainly has more tokens, before all of it is encoded, and one of
                far more data before it is rendered (see chat_bounds).

        Raises:
            InvalidRequest: the messages are invalid (see normal_messages), a text has an unpaired surrogate, the
                template is missing or fails, or the conversation is refused.
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
                f"chat_template_kwargs cannot set {', '.join(reserved)}: reserved", param="chat_template_kwargs"
            )
        nonce = self._control.nonce()

        def escape(value: Any, param: str) -> Any:
            return map_strings(value, lambda text: self._control.escape(clean_text(text, param), nonce), param=param)

        form = self._forms[bool(tools)]
        if max_tokens is not None:
            check_items(messages, max_tokens)
        normal = normal_messages(messages, modalities=modalities, form=form)
        if max_tokens is not None:
            given = {"messages": normal, "tools": tools, "chat_template_kwargs": template_kwargs}
            check_size(given, max_tokens, exceeds=partial(self.exceeds, max_tokens=max_tokens))
        conversation = escape(normal, "messages")
        schemas = escape(tools or None, "tools")
        if not form.tools:
            raise InvalidRequest("this model's chat template cannot render tools; leave them out", param="tools")
        variables = escape(dict(template_kwargs or {}), "chat_template_kwargs")
        try:
            rendered = render(
                self._hf,
                conversation,
                tools=schemas,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
            reason = self._control.unescape((str(error).splitlines() or [type(error).__name__])[0], nonce)
            raise InvalidRequest(
                f"the chat template cannot render these messages: {reason}", param="messages"
            ) from error
        return self._control.encode(rendered, nonce, max_tokens=max_tokens)

    def template_reads(self, name: str) -> bool:
        """Whether the chat template mentions a variable."""
        return re.search(rf"\b{name}\b", str(self._hf.chat_template)) is not None

    def _count_added_tokens(self, *media: Mapping[str, str]) -> int:
        """Count the added tokens that the template writes for a message of text and these parts; -1 if it fails.

        A text-only template may print the list of parts, but that adds no such token.
        """
        if not self.has_chat_template:
            return -1
        message: Any = {"role": "user", "content": [{"type": "text", "text": "Hello"}, *media]}
        try:
            rendered = render(self._hf, [message])
        except (jinja2.TemplateError, *TEMPLATE_ERRORS):
            return -1
        added = self._backend.get_added_tokens_decoder().keys()
        return sum(i in added for i in self._backend.encode(rendered, add_special_tokens=False).ids)

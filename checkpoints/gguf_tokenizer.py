"""Conversion of a GGUF file's tokenizer to tokenizer.json and tokenizer_config.json.

GGUF stores a byte-level BPE (`tokenizer.ggml.model` = "gpt2") as tokens, token types and merges. It stores the
pre-tokenizer only as a name, `tokenizer.ggml.pre`; PRE_TOKENIZERS defines those names.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gguf import ReaderField
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from checkpoints.errors import CheckpointError
from checkpoints.values import LARGEST

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

# Tokens that end a turn or a text. A file names one of them as EOS and may omit the others.
_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")

# The split pattern of Llama 3 and Qwen2. DIGITS: how many digits stay together.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str):
    return [
        pre_tokenizers.Split(Regex(_SPLIT_PATTERN.replace("DIGITS", digits)), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


PRE_TOKENIZERS = {
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": lambda: _split(""),
    "llama-bpe": lambda: _split("{1,3}"),
}

_MISSING: Any = object()


class Metadata:
    """A GGUF file's key-value pairs. Errors name the key."""

    def __init__(self, fields: Mapping[str, ReaderField]):
        self._fields = fields
        self._values = {}  # decoded once: 100,000 tokens take a second

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def value(self, key: str, default=_MISSING) -> Any:
        if key not in self._fields:
            if default is _MISSING:
                raise CheckpointError(f"the GGUF file has no metadata {key}")
            return default
        if key not in self._values:
            try:
                value = self._fields[key].contents()
            except (ValueError, IndexError, KeyError, TypeError) as error:
                raise CheckpointError(f"the GGUF metadata {key} is damaged: {error}") from error
            # The shortest decimal of the stored float32: 1e-05, not 9.999999747378752e-06.
            self._values[key] = float(str(np.float32(value))) if isinstance(value, float) else value
        return self._values[key]

    def text(self, key: str, default=_MISSING) -> str:
        return self._typed(key, default, str, "text")

    def integer(self, key: str, default=_MISSING, *, low: int = 1, high: int = LARGEST) -> int:
        return self._limited(key, self._typed(key, default, int, "one integer"), low, high)

    def number(self, key: str, default=_MISSING, *, low: float, high: float) -> float:
        return self._limited(key, self._typed(key, default, int | float, "one number"), low, high)

    def sequence(self, key: str, kind: type) -> list:
        found = self._typed(key, _MISSING, list, "an array")
        if not all(type(item) is kind for item in found):
            raise CheckpointError(f"the GGUF metadata {key} must be an array of {kind.__name__}")
        return found

    def _typed(self, key, default, kind, expected) -> Any:
        value = self.value(key, default)
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise CheckpointError(f"the GGUF metadata {key} must be {expected}, got {str(value)[:80]!r}")
        return value

    def _limited(self, key, value, low, high) -> Any:
        if not low <= value <= high:  # false for NaN, too
            raise CheckpointError(f"the GGUF metadata {key} must be from {low:,} to {high:,}, got {value}")
        return value


def token_id(metadata: Metadata, role: str) -> int | None:
    """The token id for a role ("bos", "eos", "eot", "eom", "padding", "unknown"), or None."""
    value = metadata.value(f"tokenizer.ggml.{role}_token_id", None)
    if value is None:
        return None
    size = len(_tokens(metadata))
    if type(value) is not int or not 0 <= value < size:
        raise CheckpointError(f"tokenizer.ggml.{role}_token_id is {value}, but the vocabulary has {size} tokens")
    return value


def eos_ids(metadata: Metadata) -> list[int]:
    """Ids of all tokens that end a text or a turn, the file's EOS first."""
    named = [token_id(metadata, role) for role in ("eos", "eot", "eom")]
    control = {token: i for i, (token, kind) in enumerate(_typed_tokens(metadata)) if kind == _CONTROL}
    known = [control.get(token) for token in _END_TOKENS]
    return list(dict.fromkeys(i for i in named + known if i is not None))


def tokenizer_json(metadata: Metadata) -> str:
    """Build tokenizer.json.

    Raises:
        CheckpointError: the tokenizer is not a byte-level BPE, or its pre-tokenizer is not supported.
    """
    model, pre = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre", "")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model {model!r} is not supported; supported: gpt2 (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    pairs = _typed_tokens(metadata)
    # Tokens that pad the vocabulary to the embedding's size have the type "unused"; text never contains them.
    vocab = {token: i for i, (token, kind) in enumerate(pairs) if kind != _UNUSED}
    if len(vocab) != sum(kind != _UNUSED for _, kind in pairs):
        raise CheckpointError("tokenizer.ggml.tokens lists a token twice")
    merges = [tuple(merge.split(" ")) for merge in metadata.sequence("tokenizer.ggml.merges", str)]
    missing = [m for m in merges if len(m) != 2 or m[0] not in vocab or m[1] not in vocab or m[0] + m[1] not in vocab]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of tokenizer.ggml.merges do not merge two tokens into a third; the first: {missing[0]}"
        )

    llama3, bos = pre == "llama-bpe", token_id(metadata, "bos")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
    )
    if bos is not None and metadata.value("tokenizer.ggml.add_bos_token", llama3):
        token = pairs[bos][0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, bos)]
        )
    return tokenizer.to_str(pretty=False)


def tokenizer_config(metadata: Metadata, max_length: int) -> dict:
    """Build tokenizer_config.json: the special tokens, and the chat template if the file has one."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        number = token_id(metadata, role)
        if number is not None:
            config[name] = _tokens(metadata)[number]
    template = metadata.text("tokenizer.chat_template", "")
    return config | ({"chat_template": template} if template else {})


def _tokens(metadata: Metadata) -> list[str]:
    return metadata.sequence("tokenizer.ggml.tokens", str)


def _typed_tokens(metadata: Metadata) -> list[tuple[str, int]]:
    tokens, types = _tokens(metadata), metadata.sequence("tokenizer.ggml.token_type", int)
    if len(tokens) != len(types):
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, but tokenizer.ggml.token_type has {len(types)}"
        )
    return list(zip(tokens, types, strict=True))

"""How few tokens a text can have, so that over-long prompts are refused without encoding all of them."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tokenizers

from omni_jax.inputs.token_bytes import BYTE_OF
from omni_jax.requests import InvalidRequest

# Most bytes of a text for each byte of its canonical form, e.g. three jamo (9 bytes) for a syllable (3). At most 3.
_CANONICAL_SHRINKS = 4
# A beginning of a text is encoded first. Only where the text is cut can its tokens differ from those of the whole.
_PROBE_CHARACTERS = 16  # its length, for each token of the limit
_PROBE_TOKENS = 2  # its tokens that are too many, for each token of the limit


def exceeds(text: str, limit: int, *, max_bytes: int | None, count: Callable[[str], int]) -> bool:
    """Whether a text certainly has more than `limit` tokens. False if it has more, but not twice as many.

    Args:
        max_bytes: the most bytes of a text that one token covers; None if there is no limit.
        count: counts the tokens of a text.
    """
    if max_bytes is not None and len(text) > limit * max_bytes:  # a character has at least one byte
        return True
    cut = limit * _PROBE_CHARACTERS
    while cut < len(text):
        if count(text[:cut]) > limit * _PROBE_TOKENS:
            return True
        cut *= 4
    return False


def too_long(characters: int, limit: int, param: str) -> InvalidRequest:
    """The error of a text that `exceeds` the context."""
    return InvalidRequest(
        f"this model's maximum context length is {limit} tokens, but the prompt of {characters} characters has more; "
        "shorten the prompt",
        param=param,
    )


def encode_unlocked(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text. `encode` would hold the interpreter's lock, so that servers would stand still."""
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def count_unlocked(backend: tokenizers.Tokenizer, text: str) -> int:
    """The number of tokens of a text, without those that the tokenizer adds."""
    return len(backend.encode_batch_fast([text], add_special_tokens=False)[0])


def max_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of a text that one token covers, or None if there is no limit.

    There is none if the tokenizer may drop parts of a text (white space, accents, characters that it does not know), or
    join any number of them in one token. Parts of a tokenizer.json that are not known here may do so.
    """
    parts: dict[str, Any] = json.loads(backend.to_str())
    vocab = backend.get_vocab(with_added_tokens=False)
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):  # takes any white space beside it
        return None
    shrinks = 1.0
    for step in _steps(parts["normalizer"], "normalizers"):
        if (factor := _shrinks(step)) is None:
            return None
        shrinks *= factor
    if not all(map(_keeps_text, _steps(parts["pre_tokenizer"], "pretokenizers"))) or not _knows_all(parts, vocab):
        return None
    ids = backend.get_vocab(with_added_tokens=True).values()
    # Not the vocabulary's own strings: a normalized added token has the space that it takes in that of its id only.
    longest = max(len((backend.id_to_token(i) or "").encode()) for i in ids)
    return int(longest * shrinks)


def _steps(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from _steps(step, inner)
    else:
        yield part


def _shrinks(normalizer: Mapping[str, Any]) -> float | None:
    """The most bytes of a text for each byte of its normal form; None if there is no limit."""
    match normalizer:
        case {"type": "NFC" | "NFD"}:
            return _CANONICAL_SHRINKS
        case {"type": "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": old}, "content": str(new)} if new:
            return max(1.0, len(old.encode()) / len(new.encode()))
    return None


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return behavior != "Removed"
    return False


def _knows_all(parts: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Whether each character is covered by tokens; otherwise unknown ones may be dropped, or joined in one token."""
    model = parts["model"]
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    steps = [*_steps(parts["normalizer"], "normalizers"), *_steps(parts["pre_tokenizer"], "pretokenizers")]
    if not any(step["type"] == "ByteLevel" for step in steps):
        return False
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 does not have
    return all(character in vocab for character, byte in BYTE_OF.items() if byte not in never)

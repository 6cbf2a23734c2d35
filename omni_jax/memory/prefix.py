"""Digests of KV cache blocks: a chain of SHA-256 digests, one per full block.

A block's keys and values depend on its tokens and all tokens before them, on the features that replace placeholders,
and on rotary positions; so does its digest. Blocks with equal digests are interchangeable.
"""

import array
import bisect
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from omni_jax.requests import MediaSpan, Request
from omni_jax.requests.segment import MODALITIES, Modality, Segment

_Part = TypeVar("_Part", Segment, MediaSpan)

_BLOCK = struct.Struct("<II")  # block size, spans
_SPAN = struct.Struct("<qqI")  # start relative to the block, features, bytes of the key


def root_digest(*, salt: str = "", adapter: str = "") -> bytes:
    """The parent digest of the first block of a sequence. Sequences with different salts or adapters share nothing.

    Args:
        salt: Request.cache_salt.
        adapter: Name and version of the adapter weights.
    """
    # JSON can contain unpaired surrogates, which plain UTF-8 rejects.
    first, second = salt.encode(errors="surrogatepass"), adapter.encode(errors="surrogatepass")
    return hashlib.sha256(b"omni_jax.memory.prefix 1" + struct.pack("<Q", len(first)) + first + second).digest()


def extend(digests: list[bytes], request: Request, output: Sequence[int], block_size: int) -> None:
    """Append the digests of the full blocks of a request's prompt and `output` that `digests` lacks.

    Args:
        digests: Digests of the first full blocks, in order; changed in place.
        request: The request.
        output: Token ids that follow the prompt.
        block_size: Tokens per block.
    """
    prompt = len(request.prompt_ids)
    start, stop = len(digests) * block_size, (prompt + len(output)) // block_size * block_size
    if stop <= start:
        return
    ids = array.array("i", request.prompt_ids[start:stop])
    ids.extend(output[max(start - prompt, 0) : max(stop - prompt, 0)])
    tokens = memoryview(ids).cast("B")
    shifts = _shifts(request, start, stop, block_size)
    parent = digests[-1] if digests else root_digest(salt=request.cache_salt)
    width = 4 * block_size
    text, media_stop = _BLOCK.pack(block_size, 0), request.media[-1].stop if request.media else 0
    for number, shift in enumerate(shifts):
        at = start + number * block_size
        content = parent + tokens[number * width : (number + 1) * width]
        if at < media_stop:
            spans = _overlapping(request.media, at, at + block_size)
            content += _BLOCK.pack(block_size, len(spans))
            for span in spans:
                content += _SPAN.pack(span.start - at, span.length, len(span.key)) + span.key
        else:
            content += text
        parent = hashlib.sha256(content + shift).digest()
        digests.append(parent)


def prompt_digests(request: Request, block_size: int) -> tuple[bytes, ...]:
    """The digests of the full blocks of a prompt, for Request.digests.

    For a long prompt this takes milliseconds, so it is done where requests are made, and not in the engine's thread.
    """
    digests: list[bytes] = []
    extend(digests, request, (), block_size)
    return tuple(digests)


def modality(request: Request, start: int, stop: int) -> Modality:
    """The most frequent modality of the tokens from start to stop; among equals, the first of MODALITIES."""
    if not (request.media or request.segments) or start >= request.parts_stop:
        return "text"
    parts = _parts(request, start, stop)
    if not parts:
        return "text"
    if len(parts) == 1 and parts[0].start <= start and stop <= parts[0].stop:
        return parts[0].modality
    return MODALITIES[int(_counts(request, start, stop, max(stop - start, 1))[0].argmax())]


def count_blocks(request: Request, cached: int, block_size: int) -> Iterator[tuple[Modality, int, int]]:
    """(modality, number of tokens, number of those among the first `cached` tokens) of the blocks of a prompt by the
    modality of each block; a modality may come more than once. The last block may not be full."""
    length = len(request.prompt_ids)
    if not (request.media or request.segments) or not request.parts_stop:
        yield "text", length, min(cached, length)
        return
    kinds = _counts(request, 0, length, block_size).argmax(axis=1)
    starts = np.arange(0, length, block_size)
    tokens, hits = np.minimum(block_size, length - starts), np.clip(cached - starts, 0, block_size)
    sums = (np.bincount(kinds, weights, len(MODALITIES)).tolist() for weights in (tokens, hits))
    for kind, count, found in zip(MODALITIES, *sums, strict=True):
        if count:
            yield kind, int(count), int(found)


def count_modalities(request: Request, start: int, stop: int) -> dict[Modality, int]:
    """The number of tokens from start to stop by modality.

    Placeholders count as the image or video that replaces them, tokens of a table segment as table, others and those
    after the prompt as text.
    """
    if start >= request.parts_stop:
        counts: dict[Modality, int] = dict.fromkeys(MODALITIES, 0)
        counts["text"] = stop - start
        return counts
    return dict(zip(MODALITIES, _counts(request, start, stop, max(stop - start, 1))[0].tolist(), strict=True))


def _counts(request: Request, start: int, stop: int, block_size: int) -> np.ndarray:
    """int [blocks, modalities]: number of tokens of each modality in each block of the tokens from start to stop."""
    labels = np.zeros(stop - start, np.intp)
    for part in _parts(request, start, stop):
        labels[max(part.start - start, 0) : part.stop - start] = MODALITIES.index(part.modality)
    blocks, kinds = max(-(-len(labels) // block_size), 1), len(MODALITIES)
    labels += np.arange(len(labels)) // block_size * kinds
    return np.bincount(labels, minlength=blocks * kinds).reshape(blocks, kinds)


def _parts(request: Request, start: int, stop: int) -> list[Segment | MediaSpan]:
    """The table segments and media spans with tokens from start to stop. Where they overlap, the later one counts."""
    tables = [s for s in _overlapping(request.segments, start, stop) if s.modality == "table"]
    return [*tables, *_overlapping(request.media, start, stop)]


def _overlapping(parts: Sequence[_Part], start: int, stop: int) -> list[_Part]:
    """The parts of a prompt, given in order, that have tokens from start to stop."""
    first = last = bisect.bisect_right(parts, start, key=lambda part: part.stop) if parts else 0
    while last < len(parts) and parts[last].start < stop:
        last += 1
    return list(parts[first:last])


def _shifts(request: Request, start: int, stop: int, block_size: int) -> list[bytes]:
    """For each block, int32 [tokens, 3]: rotary position minus token index; empty if all are zero."""
    if request.positions is None:
        return [b""] * ((stop - start) // block_size)
    shifts = np.full((stop - start, 3), request.position_delta, np.int32)
    given = request.positions[:, start:stop]
    shifts[: given.shape[1]] = given.T - np.arange(start, start + given.shape[1], dtype=np.int32)[:, None]
    blocks = shifts.reshape(-1, block_size * 3)
    return [block.tobytes() if block.any() else b"" for block in blocks]

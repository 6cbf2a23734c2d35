"""Digests of KV cache blocks: a chain of SHA-256 digests, one per full block.

A block's keys and values depend on its tokens and all tokens before them, on the features that replace placeholders,
and on rotary positions; so does its digest. Blocks with equal digests are interchangeable.
"""

import array
import bisect
import hashlib
import struct
from collections.abc import Sequence
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


def extend(digests: list[bytes], request: Request, known: Sequence[int], block_size: int) -> None:
    """Append the digests of the full blocks of `known` that `digests` lacks.

    Args:
        digests: Digests of the first full blocks, in order; changed in place.
        request: The request of the tokens, for its media, positions and salt.
        known: Token ids of the prompt and then of the output.
        block_size: Tokens per block.
    """
    start, stop = len(digests) * block_size, len(known) // block_size * block_size
    if stop <= start:
        return
    tokens = array.array("i", known[start:stop])
    shifts = _shifts(request, start, stop, block_size)
    parent = digests[-1] if digests else root_digest(salt=request.cache_salt)
    for at in range(start, stop, block_size):
        spans = _overlapping(request.media, at, at + block_size)
        content = parent + tokens[at - start : at - start + block_size].tobytes()
        content += _BLOCK.pack(block_size, len(spans))
        for span in spans:
            content += _SPAN.pack(span.start - at, span.length, len(span.key)) + span.key
        parent = hashlib.sha256(content + shifts[(at - start) // block_size]).digest()
        digests.append(parent)


def modality(request: Request, start: int, stop: int) -> Modality:
    """The most frequent modality of the tokens from start to stop; among equals, the first of MODALITIES."""
    if not _parts(request, start, stop):
        return "text"
    counts = count_modalities(request, start, stop)
    return max(counts, key=counts.__getitem__)


def count_modalities(request: Request, start: int, stop: int) -> dict[Modality, int]:
    """The number of tokens from start to stop by modality.

    Placeholders count as the image or video that replaces them, tokens of a table segment as table, others and those
    after the prompt as text.
    """
    labels = np.zeros(stop - start, np.int8)
    for part in _parts(request, start, stop):
        labels[max(part.start - start, 0) : part.stop - start] = MODALITIES.index(part.modality)
    counts = np.bincount(labels, minlength=len(MODALITIES)).tolist()
    return dict(zip(MODALITIES, counts, strict=True))


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

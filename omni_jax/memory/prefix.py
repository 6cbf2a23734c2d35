"""What a block of the KV cache holds, told by 32 bytes: a chain of SHA-256 digests, one a full block.

A block's keys and values depend on its tokens and on all before them, on the features that stand in the place of
placeholders, and on rotary positions; so does its digest. Blocks of equal digests can stand for each other.
"""

import array
import bisect
import hashlib
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from omni_jax.requests import MediaSpan, Request
from omni_jax.segments import MODALITIES, Modality, Segment

_BLOCK = struct.Struct("<II")  # block size, spans
_SPAN = struct.Struct("<qqI")  # place in the block, features, bytes of the key


def root_digest(*, salt: str = "", adapter: str = "") -> bytes:
    """What the first block of a sequence has for a parent. Sequences of other salts or adapters share nothing.

    Args:
        salt: Request.cache_salt.
        adapter: names the weights that are added to the model's, and their version.
    """
    # JSON may hold half of a surrogate pair, which plain UTF-8 refuses.
    first, second = salt.encode(errors="surrogatepass"), adapter.encode(errors="surrogatepass")
    return hashlib.sha256(b"omni_jax.memory.prefix 1" + struct.pack("<Q", len(first)) + first + second).digest()


def extend(digests: list[bytes], request: Request, known: Sequence[int], block_size: int) -> None:
    """Appends the digest of every full block of `known` that is not there yet.

    Args:
        digests: of the first full blocks, in order; changed in place.
        request: whose tokens they are; media, positions and salt are taken from it.
        known: token ids, of the prompt and then of the output.
        block_size: tokens a block.
    """
    start, stop = len(digests) * block_size, len(known) // block_size * block_size
    if stop <= start:
        return
    tokens = array.array("i", known[start:stop])
    shifts = _shifts(request, start, stop)
    parent = digests[-1] if digests else root_digest(salt=request.cache_salt)
    for at in range(start, stop, block_size):
        place = slice(at - start, at - start + block_size)
        spans = list(_overlapping(request.media, at, at + block_size)) if request.media else ()
        content = parent + tokens[place].tobytes() + _BLOCK.pack(block_size, len(spans))
        for span in spans:
            content += _SPAN.pack(span.start - at, span.length, len(span.key)) + span.key
        if shifts is not None and shifts[place].any():
            content += shifts[place].tobytes()
        parent = hashlib.sha256(content).digest()
        digests.append(parent)


def modality(request: Request, start: int, stop: int) -> Modality:
    """What most of the tokens from start to stop are; of equals, the first of text, image, video, table."""
    counts = count_modalities(request, start, stop)
    return max(counts, key=counts.__getitem__)


def count_modalities(request: Request, start: int, stop: int) -> dict[Modality, int]:
    """How many tokens from start to stop are of which modality: placeholders are what replaces them, tokens of a
    segment of that modality are a table, others are text. Places behind the prompt are text."""
    tables = list(_tables(request, start, stop)) if request.segments else ()
    spans = list(_overlapping(request.media, start, stop)) if request.media else ()
    if not tables and not spans:
        return dict.fromkeys(MODALITIES, 0) | {"text": stop - start}
    labels = np.zeros(stop - start, np.int8)
    for part in (*tables, *spans):
        labels[max(part.start - start, 0) : part.stop - start] = MODALITIES.index(part.modality)
    counts = np.bincount(labels, minlength=len(MODALITIES)).tolist()
    return dict(zip(MODALITIES, counts, strict=True))


def _tables(request: Request, start: int, stop: int) -> Iterator[Segment]:
    """Segments that are tables and have tokens from start to stop."""
    for index in range(bisect.bisect_right(request.segment_stops, start), len(request.segments)):
        if request.segments[index].start >= stop:
            return
        if request.segments[index].modality == "table":
            yield request.segments[index]


def _overlapping(media: Sequence[MediaSpan], start: int, stop: int) -> Iterator[MediaSpan]:
    """Spans that have placeholders from start to stop."""
    for index in range(bisect.bisect_right(media, start, key=lambda span: span.stop), len(media)):
        if media[index].start >= stop:
            return
        yield media[index]


def _shifts(request: Request, start: int, stop: int) -> np.ndarray | None:
    """int32 [tokens, 3]: by how much the rotary positions of tokens differ from their places. None: not at all."""
    if request.positions is None:
        return None
    shifts = np.full((stop - start, 3), request.position_delta, np.int32)
    given = request.positions[:, start:stop]
    shifts[: given.shape[1]] = given.T - np.arange(start, start + given.shape[1], dtype=np.int32)[:, None]
    return shifts

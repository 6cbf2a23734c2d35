"""Recycling policies: which cached block is evicted first when blocks run out.

A policy returns the value of a candidate in seconds; the block with the smallest value is evicted first. A block that
was used once is worth the time of that use, whatever its modality. Any further value is a number of seconds by which
that use would have had to be later.

Candidates are only blocks that no sequence holds and no cached block continues, so a policy need not handle chains.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from omni_jax.user_code import load_function

HALF_LIFE_SECONDS = 600.0  # age at which a use counts half
PINNED_BLOCKS = 64  # blocks from the start of a text; 1,024 tokens of 16-token blocks, as long as most system prompts
PIN_SECONDS = 3600.0  # added to the value of pinned blocks; finite, or old chats would fill the pool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockUse:
    """What a recycling policy sees of a cached block that no sequence holds.

    Attributes:
        modality: "text", "image", "video" or "table": the modality of most of its tokens.
        depth: Number of blocks before it in its chain; 0 at the start of a prompt.
        last_used: Engine time in seconds at which it was last freed.
        uses: Decayed number of uses (held, then freed) as of last_used. A use counts 2 ** -(its age /
            HALF_LIFE_SECONDS), so a block used more than once within days has more than 1.
    """

    modality: str
    depth: int
    last_used: float
    uses: float


RecyclingPolicy = Callable[[BlockUse], float]


def decay(seconds: float) -> float:
    """Share of a number of uses that still counts after so many seconds. So the number of uses stays finite."""
    return 2.0 ** (-seconds / HALF_LIFE_SECONDS)


def lru(use: BlockUse) -> float:
    """Least recently used first."""
    return use.last_used


def lfu(use: BlockUse) -> float:
    """Least frequently used first, with old uses decaying.

    The value is HALF_LIFE_SECONDS * log2(sum of 2 ** (t / HALF_LIFE_SECONDS) over the times t of all uses): the
    logarithm of the decayed count in a form that does not change with time, so values of untouched blocks stay
    comparable (combined recency and frequency, Lee et al., "LRFU", IEEE Trans. Computers 50 (12), 2001, with
    lambda = 1 / half-life).
    """
    return use.last_used + HALF_LIFE_SECONDS * math.log2(use.uses)


def by_modality(use: BlockUse) -> float:
    """LRU for images and video, which are reused soon, in the same conversation, or not at all; LFU for text. System
    prompts (the start of a text used more than once) and tables are evicted last."""
    if use.modality in ("image", "video"):
        return lru(use)
    pinned = use.modality == "table" or (use.depth < PINNED_BLOCKS and use.uses > 1)
    return lfu(use) + (PIN_SECONDS if pinned else 0.0)


POLICIES: dict[str, RecyclingPolicy] = {"lru": lru, "by_modality": by_modality}


def make_recycling(name: str) -> RecyclingPolicy:
    """Make a recycling policy from its name in POLICIES, or from the path "package.module:function" of a custom one.

    Raises:
        ValueError: The policy, module or function does not exist, cannot be called, or fails for an example of some
            modality. A custom policy raises ValueError if it fails later or does not return a number.
    """
    if name in POLICIES:
        return POLICIES[name]
    policy = _checked(
        name, load_function(name, "recycling policy", f"{', '.join(POLICIES)} or 'package.module:function'")
    )
    for modality in ("text", "image", "video", "table"):
        policy(BlockUse(modality=modality, depth=0, last_used=0.0, uses=1.0))
    return policy


def _checked(path: str, function: Callable[[BlockUse], Any]) -> RecyclingPolicy:
    def policy(use: BlockUse) -> float:
        try:
            returned = function(use)
        except Exception as error:  # custom code
            raise ValueError(f"recycling policy {path} failed for {use}: {type(error).__name__}: {error}") from error
        try:
            value = float(returned)
        except (TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            raise ValueError(f"recycling policy {path} must return a number of seconds, got {returned!r} for {use}")
        return value

    return policy

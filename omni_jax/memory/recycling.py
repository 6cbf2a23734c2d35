"""Which cached block is given up first when blocks run out.

A policy gives each candidate a value in seconds; the block with the smallest goes first. A block that was used once is
worth the time of that use, whatever it holds, so that modalities can be compared; what more it is worth is counted in
seconds, too: "as if it had been used so much later".

Candidates are only blocks that nobody holds and no cached block continues, so a policy never needs to know of chains.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from omni_jax.user_code import load_function

HALF_LIFE_SECONDS = 600.0  # a use counts half so long after it
PINNED_BLOCKS = 64  # from the beginning of a text; with 16 tokens a block 1,024, as long as most system prompts
PIN_SECONDS = 3600.0  # what is pinned outlives all else by so long; for ever, and old chats would fill the pool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockUse:
    """What is known of a cached block that nobody holds.

    Attributes:
        modality: "text", "image", "video" or "table": what most of its tokens are.
        depth: blocks before it in its chain; 0 is the beginning of a prompt.
        last_used: when its last holder gave it back, in the engine's seconds.
        uses: how often it was held and given back, as of last_used. Each use counts 2 ** -(its age /
            HALF_LIFE_SECONDS), so this is above 1 for what was used more than once (and not days apart).
    """

    modality: str
    depth: int
    last_used: float
    uses: float


RecyclingPolicy = Callable[[BlockUse], float]


def count_use(uses: float, last_used: float, now: float) -> float:
    """Decayed number of uses after one more at `now`, from what it was after the last. Never beyond what a float holds:
    old uses fade."""
    return 1.0 + uses * 2.0 ** ((last_used - now) / HALF_LIFE_SECONDS)


def lru(use: BlockUse) -> float:
    """Least recently used first."""
    return use.last_used


def lfu(use: BlockUse) -> float:
    """Least frequently used first, old uses fading.

    This is HALF_LIFE_SECONDS * log2(sum of 2 ** (t / HALF_LIFE_SECONDS) over the times t of all uses): the logarithm of
    the decayed count, in a form that time does not change. So values of blocks stay comparable though nobody touches
    them (the combined recency and frequency of Lee et al., "LRFU", IEEE Trans. Computers 50 (12), 2001, with
    lambda = 1 / half-life).
    """
    return use.last_used + HALF_LIFE_SECONDS * math.log2(use.uses)


def by_modality(use: BlockUse) -> float:
    """Images and video by LRU: they come back soon, in the same conversation, or not at all. Text by LFU. System
    prompts (the beginning of a text that was used more than once) and tables last."""
    if use.modality in ("image", "video"):
        return lru(use)
    pinned = use.modality == "table" or (use.depth < PINNED_BLOCKS and use.uses > 1)
    return lfu(use) + (PIN_SECONDS if pinned else 0.0)


POLICIES: dict[str, RecyclingPolicy] = {"lru": lru, "by_modality": by_modality}


def make_recycling(name: str) -> RecyclingPolicy:
    """A policy by its name in POLICIES, or one of somebody's own by its path, "package.module:function".

    Raises:
        ValueError: no such policy, module or function; it cannot be called, or it fails for an example of some
            modality. The policy itself raises ValueError when it fails later or returns what is no number.
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
        except Exception as error:  # somebody else's code
            raise ValueError(f"recycling policy {path} failed for {use}: {type(error).__name__}: {error}") from error
        try:
            value = float(returned)
        except (TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            raise ValueError(f"recycling policy {path} must return seconds, a number; got {returned!r} for {use}")
        return value

    return policy

"""Characters of a text and the tokens they came from."""

import dataclasses
import functools

import numpy as np

from omni_jax.segments.prompt_view import PromptView

CONTROL = "\f"  # stands for a control token; a form feed in a text separates as much


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenText:
    """The text of a run of tokens. Places are counted from the start of the run.

    Attributes:
        text: with CONTROL for each control token.
        ends: int64 [tokens], characters up to each token's end.
        blank: bool [tokens], tokens of white space only.
    """

    text: str
    ends: np.ndarray
    blank: np.ndarray

    @classmethod
    def of(cls, view: PromptView, start: int, stop: int) -> "TokenText":
        """The text of the view's tokens [start, stop)."""
        texts = list(view.token_texts(start, stop))
        blank = np.fromiter(map(str.isspace, texts), bool, len(texts))
        for place in view.part(start, stop).controls:
            texts[place] = CONTROL
            blank[place] = False
        return cls(text="".join(texts), ends=np.cumsum([len(text) for text in texts]), blank=blank)

    def ceil(self, chars: list[int]) -> np.ndarray:
        """int64 [chars]: the first token ends at or behind those characters' starts."""
        return np.where(np.asarray(chars, np.int64) > 0, np.searchsorted(self.ends, chars) + 1, 0)

    def floor(self, chars: list[int]) -> np.ndarray:
        """int64 [chars]: the last token ends at or before those characters' starts."""
        return np.searchsorted(self.ends, chars, side="right")

    def skip_blank(self, places: np.ndarray) -> np.ndarray:
        """Those places, moved behind the tokens of white space that follow them."""
        return self._not_blank[places]

    @functools.cached_property
    def _not_blank(self) -> np.ndarray:
        """int64 [tokens + 1]: the first place from each on that holds no blank token."""
        count = len(self.blank)
        own = np.where(np.append(self.blank, False), count, np.arange(count + 1))
        return np.minimum.accumulate(own[::-1])[::-1]

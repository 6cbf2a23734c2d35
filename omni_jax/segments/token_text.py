"""The text of tokens, with maps between characters and tokens."""

import dataclasses
import functools

import numpy as np

from omni_jax.segments.prompt_view import PromptView

CONTROL = "\f"  # stands for a control token, since a form feed in a text is a separator too


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenText:
    """The text of a run of tokens. Token indices count from the start of the run.

    Attributes:
        text: Text with CONTROL for each control token.
        ends: int64 [tokens], the character index after each token.
        blank: bool [tokens], whether a token is white space only.
    """

    text: str
    ends: np.ndarray
    blank: np.ndarray

    @classmethod
    def of(cls, view: PromptView, start: int, stop: int) -> "TokenText":
        """The text of the view's tokens [start, stop)."""
        texts = list(view.token_texts(start, stop))
        blank = np.fromiter(map(str.isspace, texts), bool, len(texts))
        for index in view.part(start, stop).controls:
            texts[index] = CONTROL
            blank[index] = False
        return cls(text="".join(texts), ends=np.cumsum([len(text) for text in texts]), blank=blank)

    def ceil(self, chars: list[int]) -> np.ndarray:
        """int64 [chars]: the first token boundary at or after each character index."""
        return np.where(np.asarray(chars, np.int64) > 0, np.searchsorted(self.ends, chars) + 1, 0)

    def floor(self, chars: list[int]) -> np.ndarray:
        """int64 [chars]: the last token boundary at or before each character index."""
        return np.searchsorted(self.ends, chars, side="right")

    def skip_blank(self, boundaries: np.ndarray) -> np.ndarray:
        """Token boundaries, moved past the tokens of white space that follow them."""
        return self._not_blank[boundaries]

    @functools.cached_property
    def _not_blank(self) -> np.ndarray:
        """int64 [tokens + 1]: the first boundary at or after each one that no blank token follows."""
        count = len(self.blank)
        own = np.where(np.append(self.blank, False), count, np.arange(count + 1))
        return np.minimum.accumulate(own[::-1])[::-1]

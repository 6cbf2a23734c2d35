"""The one error of this floor."""

from collections.abc import Sequence

_SHOWN = 20  # faults written out in the message; all are in the attribute


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with everything that is wrong with it.

    Attributes:
        faults: one sentence each.
    """

    def __init__(self, faults: Sequence[str] | str, *, what: str = ""):
        """
        Args:
            faults: what is wrong, one sentence each.
            what: what they are faults of: the message's first line.
        """
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        shown = self.faults[:_SHOWN]
        if len(self.faults) > _SHOWN:
            shown.append(f"and {len(self.faults) - _SHOWN} more")
        super().__init__("\n".join([what, *(f"  - {fault}" for fault in shown)]) if what else "; ".join(shown))

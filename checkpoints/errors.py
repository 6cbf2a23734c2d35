"""The error that every function of this package raises."""

from collections.abc import Sequence

_SHOWN = 20  # faults in the message; the attribute holds all of them


class CheckpointError(ValueError):
    """A checkpoint cannot be used.

    Attributes:
        faults: everything that is wrong with it, one sentence each.
    """

    def __init__(self, faults: Sequence[str] | str, *, what: str = ""):
        """
        Args:
            faults: what is wrong, one sentence each.
            what: the first line of the message, which names the checkpoint.
        """
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        shown = self.faults[:_SHOWN]
        if len(self.faults) > _SHOWN:
            shown.append(f"and {len(self.faults) - _SHOWN} more")
        super().__init__("\n".join([what, *(f"  - {fault}" for fault in shown)]) if what else "; ".join(shown))

"""Full garbage collections at quiet times.

A full collection stops all threads while it looks at every object: for a third of a second if 3,000 requests wait.
Python makes one whenever the objects have grown by a quarter, so while a crowd arrives. Reference counting frees what
requests leave; only rare cycles need a full collection, and they can wait.
"""

import gc

_MANY = 10_000  # collections of young objects after which a full one is made at any time
_DUE = 10  # the same at a quiet time, as Python would


def postpone() -> None:
    """Leave what exists now out of all full collections, and make them only in `collect`, or if it is not called for
    long."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _MANY)


def collect() -> None:
    """Make a full collection if one is due. Call it when few objects were made since `postpone` that still exist."""
    if gc.get_count()[2] > _DUE:
        gc.collect()

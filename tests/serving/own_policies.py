"""Segment policies of somebody's own, good and bad, and controllers of compression."""


def halves(view):
    middle = view.length // 2
    return [(0, middle), (middle, view.length)]


def gap(view):
    return [(0, 2), (3, view.length)]


def overlap(view):
    return [(0, 3), (2, view.length)]


def raises(view):
    return [view.nothing]


def sometimes(view):
    """Leaves the end out where the text says so."""
    return [(0, view.length - ("bad" in view.text(0, view.length)))]


def third(step, total):
    return 0.33


def too_much(step, total):
    return 1.5

"""Custom functions, good and bad: segment policies and compression controllers."""


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
    """Leaves out the last token of prompts with the text "bad"."""
    return [(0, view.length - ("bad" in view.text(0, view.length)))]


def third(step, total):
    return 0.33


def too_much(step, total):
    return 1.5

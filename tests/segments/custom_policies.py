"""Custom policies, valid and invalid, that tests load by their path."""

import itertools

from omni_jax.requests.segment import Segment

not_a_function = 3


class Namespace:
    @staticmethod
    def halves(view):
        return [(0, view.length // 2), (view.length // 2, view.length)]


def by_media(view):
    edges = sorted({0, view.length, *(edge for item in view.media for edge in (item.start, item.stop))})
    return list(itertools.pairwise(edges))


def labelled(view):
    return (Segment(start=0, stop=view.length, modality="table", label="all", priority=2),)


def by_words(view):
    cuts = [index for index in range(1, view.length) if view.text(index, index + 1).startswith(" ")]
    return tuple((start, stop, "text") for start, stop in zip([0, *cuts], [*cuts, view.length], strict=True))


def gap(view):
    return [(0, 2), (3, view.length)]


def overlap(view):
    return [(0, 3), (2, view.length)]


def short(view):
    return [(0, view.length - 1)]


def long(view):
    return [(0, view.length + 1)]


def empty(view):
    return [(0, 0), (0, view.length)]


def raises(view):
    return [(0, {}["missing"])]


def nothing(view):
    pass


def lazy(view):
    yield (0, view.length)


def strings(view):
    return ["01"]


def fractions(view):
    return [(0, view.length / 1)]


def unknown_modality(view):
    return [(0, view.length, "audio")]


def wrong_class(view):
    return [Segment(start=0, stop=view.length, modality="text", compute="decode")]


def too_many(view):
    return [(0, view.length, "text", "a label")]

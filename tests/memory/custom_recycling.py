"""Custom recycling policies, valid and invalid, that tests load by their path."""

not_a_function = 3


class Namespace:
    @staticmethod
    def oldest(use):
        return use.last_used


def deepest(use):
    return -use.depth


def raises(use):
    raise KeyError(use.modality)


def lacks_video(use):
    return {"text": 1.0, "image": 2.0, "table": 3.0}[use.modality]


def nothing(use):
    return None


def words(use):
    return "soon"


def no_number(use):
    return float("nan")


def fails_when_used_twice(use):
    return use.last_used if use.uses <= 1 else "often"

"""--mesh data=2,model=4."""


def parse_mesh(text: str) -> tuple[int, int]:
    """(data, model); an axis that is not named is 1.

    Raises:
        ValueError: it is not like data=2,model=4.
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name: size for name, _, size in parts}
    known = sizes.keys() <= {"data", "model"} and len(sizes) == len(parts)
    if not known or not all(size.isdecimal() and int(size) for size in sizes.values()):
        raise ValueError(f"--mesh must be like data=2,model=4, got {text!r}")
    return int(sizes.get("data", 1)), int(sizes.get("model", 1))

"""A file of settings for --config: JSON or YAML, flags by their names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_jax.yaml_file import read_mapping


def load(path: str | Path) -> dict[str, Any]:
    """What the file sets, by flag; mappings are JSON text, as on the command line.

    A key may have - or _ between its words. `segment_policies`, a policy for each modality, is another name of
    `segment_policy`. A null value leaves the default. Paths are relative to the working directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON or YAML, or has a key twice; the message begins with the path.
    """
    found: dict[str, Any] = {}
    for key, value in read_mapping(Path(path)).items():
        name = key.replace("_", "-")
        name = "segment-policy" if name == "segment-policies" else name
        if name in found:
            raise ValueError(f"{path}: {name.replace('-', '_')} is given twice")
        found[name] = value
    return {name: _as_text(value) for name, value in found.items() if value is not None}


def _as_text(value: Any) -> Any:
    """Mappings and items of lists as a command line has them."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    return [_as_text(item) for item in value] if isinstance(value, list) else value

"""A file of settings for --config: JSON or YAML, flags by their names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load(path: str | Path) -> dict[str, Any]:
    """What the file sets, by flag; mappings are JSON text, as on the command line.

    A key may have - or _ between its words. `segment_policies`, a policy for each modality, is another name of
    `segment_policy`. A null value leaves the default. Paths are relative to the working directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON or YAML, or has a key twice.
    """
    found: dict[str, Any] = {}
    for key, value in _read(Path(path)).items():
        name = str(key).replace("_", "-")
        name = "segment-policy" if name == "segment-policies" else name
        if name in found:
            raise ValueError(f"{path}: {name.replace('-', '_')} is given twice")
        found[name] = value
    return {name: _as_text(value) for name, value in found.items() if value is not None}


def _read(path: Path) -> Mapping[str, Any]:
    import yaml  # only here: few starts have such a file

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice, of which YAML would keep the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            _check_once(keys)
            return super().construct_mapping(node, deep)

    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
        if path.suffix.lower() == ".json":
            settings = json.loads(text, object_pairs_hook=_object)
        else:
            settings = yaml.load(text, Loader)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {type(settings).__name__}")
    return settings


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_once([key for key, _ in pairs])
    return dict(pairs)


def _check_once(keys: list[Any]) -> None:
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise ValueError(f"{key} is given twice")


def _as_text(value: Any) -> Any:
    """Mappings and items of lists as a command line has them."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    return [_as_text(item) for item in value] if isinstance(value, list) else value

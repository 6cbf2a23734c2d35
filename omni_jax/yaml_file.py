"""Strict reader of YAML and JSON files: plain values only, text as keys, each key once."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"  # the key "<<"
_PLAIN = ("map", "seq", "str", "int", "float", "bool", "null")  # the types that JSON has too


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys, of which it would keep the last, and keys that are not text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        _check_keys(keys, f"line {node.start_mark.line + 1}: ")
        return super().construct_mapping(node, deep)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """YAML 1.1 reads 010 as 8, 1_0 as 10 and 1:30 as 90."""
    if not re.fullmatch(r"[+-]?(0|[1-9][0-9]*)", node.value):
        line = node.start_mark.line + 1
        raise ValueError(f"line {line}: {node.value} is not a decimal integer; put it in quotes if it is text")
    return int(node.value)


_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _PLAIN
}
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)  # a date stays text


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a file: JSON if the name ends with .json, else YAML.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, YAML or JSON; its top level is not a mapping; a key is repeated or not text. The
            message begins with the path.
    """
    data = path.read_bytes()
    kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
    try:
        text = data.decode("utf-8-sig")
        tree = read_json(text) if kind == "JSON" else yaml.load(text, _Loader)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not {kind}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if tree is None:  # nothing but comments
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected a mapping of keys to values, got {type(tree).__name__}")
    return tree


def read_json(text: str) -> Any:
    """Return the value of a JSON text: of a flag, a field, or a line of a file.

    Raises:
        ValueError: it is not JSON, or a key is repeated, of which Python would keep the last.
    """
    return json.loads(text, object_pairs_hook=_mapping)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_keys([key for key, _ in pairs])
    return dict(pairs)


def _check_keys(keys: list[Any], where: str = "") -> None:
    for number, key in enumerate(keys):
        if not isinstance(key, str):
            raise ValueError(f"{where}the key {key!r} is not text; put it in quotes")
        if key in keys[:number]:
            raise ValueError(f"{where}{key} is given twice")

"""A file of settings in place of MODEL: JSON or YAML, flags by their names, with the model and its segment policies."""

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".yaml", ".yml")
OWN_KEYS = ("model", "tokenizer", "segment_policies")  # those that are no flags
JSON_FLAGS = ("segment_policy", "limit_mm_per_prompt")  # their values may be objects


def is_settings(path: Path) -> bool:
    """Whether what stands in place of MODEL is a file of settings: models are directories."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def load(path: Path, *, flags: Mapping[str, bool]) -> tuple[Path, dict[str, Any]]:
    """The model's directory and what the file sets of the flags, as the command line would write it.

    Paths are relative to the working directory, as they are on the command line; "~" is the home directory in that of
    the model.

    Args:
        flags: name -> whether it is a switch, of all that may be set.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON or YAML, has an unknown key (the nearest valid one is named) or one twice, has no
            model, or a value that no flag can have.
    """
    settings = _read(path)
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in flags and name not in OWN_KEYS:
            raise ValueError(f"{path}: unknown key {key!r}; the nearest valid one is {_nearest(name, flags)!r}")
        if name in found:
            raise ValueError(f"{path}: {name} is given twice")
        found[name] = value
    model = found.pop("model", None)
    if not isinstance(model, str) or not model:
        raise ValueError(f"{path}: model must be a model's directory, got {model!r}")
    tokenizer = found.pop("tokenizer", None) or model
    if Path(str(tokenizer)).expanduser().resolve() != Path(model).expanduser().resolve():
        raise ValueError(
            f"{path}: tokenizer is {tokenizer!r}, model {model!r}; a tokenizer from elsewhere is not supported yet: "
            "put its files into the model's directory"
        )
    policies = found.pop("segment_policies", None)
    if policies is not None:
        if found.get("segment_policy") is not None:
            raise ValueError(f"{path}: segment_policy and segment_policies exclude each other")
        if not isinstance(policies, Mapping) or "policy" in policies:
            raise ValueError(f"{path}: segment_policies maps modalities to policies, got {policies!r}")
        found["segment_policy"] = policies
    given = {name: value for name, value in found.items() if value is not None}
    try:
        return Path(model).expanduser(), {name: _written(name, value, flags[name]) for name, value in given.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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


def _nearest(name: str, flags: Collection[str]) -> str:
    return difflib.get_close_matches(name, [*OWN_KEYS, *flags], n=1, cutoff=0.0)[0]


def _written(name: str, value: Any, switch: bool) -> Any:
    """A value as words of a command line, which checks them; a switch as it is."""
    if switch != isinstance(value, bool):
        wanted = "true or false" if switch else "a number, a text or a list of them"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    if switch:
        return value
    if isinstance(value, Mapping):
        if name not in JSON_FLAGS:
            raise ValueError(f"{name} must be a number, a text or a list of them, got {value!r}")
        return json.dumps(value)
    if isinstance(value, list):
        if not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in value):
            raise ValueError(f"{name} must be a list of numbers or texts, got {value!r}")
        return [str(item) for item in value]
    return str(value)

"""Where settings come from besides flags: environment variables and the file of --config.

Only commands with --config read them: `serve`, `chat` and `generate`, in which a setting means the same. An empty value
is an error: a variable that a deployment left blank must not open the server or lift a limit.
"""

import decimal
import difflib
import json
import logging
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection, CycloptsError, Token
from cyclopts.argument import Argument
from cyclopts.utils import UNSET

from omni_jax.yaml_file import read_mapping
from serving.cli.options import PANELS, field_names

logger = logging.getLogger(__name__)

ENV_PREFIX = "OMNI_JAX_"
_KUBERNETES = re.compile(r"OMNI_JAX_(SERVICE_(HOST|PORT)|PORT)(_|$)")  # of a Kubernetes service named omni-jax
_ALIASES = {"segment-policies": "segment-policy"}  # in files: a policy for each modality
_ELSEWHERE = {"model", "log-level", *field_names(kind for kinds in PANELS.values() for kind in kinds)}


def from_variables(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Takes from the environment what no flag has set."""
    flags = _flags(arguments)
    if "config" not in flags:
        return
    for variable in sorted(name for name in os.environ if name.startswith(ENV_PREFIX)):
        name, value = variable.removeprefix(ENV_PREFIX).lower().replace("_", "-"), os.environ[variable]
        if _KUBERNETES.match(variable) and (name != "port" or value.startswith("tcp://")):
            continue
        if name not in flags:
            if name not in _ELSEWHERE:
                logger.warning("unknown environment variable %s%s", variable, _hint(name, flags, _as_variable))
            continue
        if not flags[name].tokens:
            several = _is_several(flags[name].hint)
            _give(flags[name], value.split() if several else [value], source=variable)


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Takes from the file of --config what neither a flag nor a variable has set.

    Its keys are flags with - or _ between the words. Mappings may stand where a flag takes JSON. Settings of `serve`
    that this command does not have are ignored, so that one file is for several commands.
    """
    flags = _flags(arguments)
    config = flags.pop("config", None)
    if config is None or not config.tokens:
        return
    path = config.tokens[0].value
    try:
        settings = read_mapping(Path(path).expanduser())
    except (OSError, ValueError) as error:
        raise CycloptsError(msg=str(error)) from None
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = key.replace("_", "-")
        name = _ALIASES.get(name, name)
        if name in found:
            raise CycloptsError(msg=f"{path}: {name.replace('-', '_')} is given twice")
        found[name] = value
    for name, value in found.items():
        key = name.replace("-", "_")
        if name not in flags:
            if name in _ELSEWHERE:
                continue
            raise CycloptsError(
                msg=f"{path}: unknown key {key}{_hint(name, flags, lambda flag: flag.replace('-', '_'))}"
            )
        values = value if isinstance(value, list) else [value]
        if not flags[name].tokens:
            words = [_as_word(item, flags[name].hint, f"{path}: {key}") for item in values]
            _give(flags[name], words, source=f"{key} in {path}")


def check_tokens(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuses empty values, and a fraction for an integer, which cyclopts would round. Writes integers such as 32k
    out."""
    for argument in arguments:
        for place, token in enumerate(argument.tokens if argument.name.startswith("--") else ()):
            source = token.source if token.source not in ("", "cli") else argument.name
            if not token.value.strip() and token.implicit_value is UNSET:  # a switch has an implicit value
                raise CycloptsError(msg=f"{source} is empty: give it a value, or leave it out")
            kinds = set(_kinds(argument.hint))
            if int in kinds and not kinds & {float, str} and (number := _written_out(token.value)) is not None:
                argument.tokens[place] = Token(
                    keyword=token.keyword, value=str(number), source=token.source, index=token.index
                )
            elif int in kinds and not kinds & {float, str} and not re.fullmatch(r"[+-]?\d+", token.value):
                raise CycloptsError(msg=f"{source} must be an integer, got {token.value!r}")


def _written_out(text: str) -> int | None:
    """The integer of a text such as 32k (thousands) or 32K (1,024s), with vLLM's units; None if it is not like that."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text)
    if match is None:
        return None
    power = 1 + "kmgt".index(match[2].lower())
    value = decimal.Decimal(match[1]) * (1000 if match[2].islower() else 1024) ** power
    return int(value) if value == int(value) else None


def _flags(arguments: ArgumentCollection) -> dict[str, Argument]:
    """Arguments by their flag, without the dashes. --no-... forms are not among them."""
    return {argument.name.removeprefix("--"): argument for argument in arguments if argument.name.startswith("--")}


def _give(argument: Argument, values: list[str], *, source: str) -> None:
    if not values:
        raise CycloptsError(msg=f"{source} is empty: give it a value, or leave it out")
    if len(values) > 1 and not _is_several(argument.hint):
        raise CycloptsError(msg=f"{source} must be one value, got {len(values)}")
    for index, value in enumerate(values):
        argument.append(Token(keyword=argument.name, value=value, source=source, index=index))


def _as_word(value: Any, hint: Any, where: str) -> str:
    """A value of a file as a word of a command line."""
    if value is None:
        raise CycloptsError(msg=f"{where} is empty: give it a value, or leave it out")
    if isinstance(value, Mapping):
        return json.dumps(value)
    if not isinstance(value, str) and not set(_kinds(hint)) & {bool, int, float}:
        raise CycloptsError(msg=f"{where} must be text: put {value!r} in quotes")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _hint(name: str, flags: Iterable[str], spelling: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name, list(flags), n=1)
    return f"; did you mean {spelling(near[0])}?" if near else ""


def _as_key(flag: str) -> str:
    return flag.replace("-", "_")


def _as_variable(flag: str) -> str:
    return ENV_PREFIX + flag.upper().replace("-", "_")


def _is_several(hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return any(_is_several(part) for part in parts)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _kinds(hint: Any) -> list[Any]:
    """The plain types in a type."""
    parts = typing.get_args(hint)
    if not parts:
        return [hint]
    parts = parts[:1] if typing.get_origin(hint) is typing.Annotated else parts
    return [kind for part in parts for kind in _kinds(part)]

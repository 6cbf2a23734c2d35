"""The panels of `--help`, and the options that several commands share.

Each panel shows a class of settings: its fields are the flags, its docstring is the help.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import docstring_parser
from cyclopts import Group, Parameter

from omni_jax.engine.config import (
    CacheSettings,
    EncoderSettings,
    ModelSettings,
    ParallelSettings,
    SchedulingSettings,
)
from omni_jax.settings import Settings
from serving.http.settings import MediaAccessSettings, MediaSettings, SecuritySettings, ServerSettings

PANELS: dict[str, tuple[type, ...]] = {
    "Server": (ServerSettings,),
    "Model": (ModelSettings,),
    "Cache": (CacheSettings,),
    "Scheduling": (SchedulingSettings,),
    "Media": (EncoderSettings, MediaSettings),
    "Security": (SecuritySettings, MediaAccessSettings),
    "Several devices": (ParallelSettings,),
}
_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(PANELS)}

Server = Annotated[ServerSettings | None, Parameter(name="*", group=_GROUPS["Server"])]
Model = Annotated[ModelSettings | None, Parameter(name="*", group=_GROUPS["Model"])]
Cache = Annotated[CacheSettings | None, Parameter(name="*", group=_GROUPS["Cache"])]
Scheduling = Annotated[SchedulingSettings | None, Parameter(name="*", group=_GROUPS["Scheduling"])]
Encoder = Annotated[EncoderSettings | None, Parameter(name="*", group=_GROUPS["Media"])]
Media = Annotated[MediaSettings | None, Parameter(name="*", group=_GROUPS["Media"])]
Security = Annotated[SecuritySettings | None, Parameter(name="*", group=_GROUPS["Security"])]
Access = Annotated[MediaAccessSettings | None, Parameter(name="*", group=_GROUPS["Security"])]
Parallel = Annotated[ParallelSettings | None, Parameter(name="*", group=_GROUPS["Several devices"])]

Config = Annotated[Path | None, Parameter(name="--config")]
AsJson = Annotated[bool, Parameter(name="--json", negative=())]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], Parameter(name="--log-level")]
Switch = Parameter(negative=())  # a flag that has no --no-... form

# vLLM's short forms. Cyclopts would read -tp as -t -p.
SHORT_FORMS = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
}


def descriptions(settings: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each field."""
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        for entry in docstring_parser.parse(base.__doc__ or "").params:
            found[entry.arg_name] = " ".join((entry.description or "").split())
    return found


def field_names(settings: Iterable[type]) -> list[str]:
    """The fields of classes of settings, spelt as flags without the dashes."""
    return [field.name.replace("_", "-") for kind in settings for field in dataclasses.fields(kind)]


def select(settings: type[Settings], *names: str) -> type[Settings]:
    """A class of some of the fields of another one, for a command that takes no others."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    hints, texts = get_type_hints(settings, include_extras=True), descriptions(settings)
    doc = "\n".join(["Settings of the engine.", "", "Attributes:", *(f"    {name}: {texts[name]}" for name in names)])
    return dataclasses.make_dataclass(
        f"Some{settings.__name__}",
        [(name, hints[name], dataclasses.field(default=fields[name].default)) for name in names],
        bases=(Settings,),
        namespace={"__module__": __name__, "__doc__": doc},  # cyclopts does not look into classes of the module "types"
        frozen=True,
        kw_only=True,
    )

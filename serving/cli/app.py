"""The application: how arguments, environment and a file of settings become the parameters of a command."""

import sys
import typing
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.config import Dict, Env
from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry

from omni_jax.settings import expected
from serving.cli import config_file
from serving.cli.options import SHORT_FORMS
from serving.cli.support import INTERRUPTED, usage_error

ENV_PREFIX = "OMNI_JAX_"
_METAVARS = {"CHOICE": "NAME", "PATH|STR": "PATH", "STR|(MAPPING[STR, ANY])": "STR", "STR|(MAPPING[STR, INT])": "STR"}
_NAME_WIDTH = 34  # of --no-enable-adaptive-compression, the longest flag


def _names(entry: HelpEntry) -> str:
    """The flag and its value, the --no-... form where the flag is on by default; a line for each if need be."""
    labels = list(entry.display_labels_with_metavar)
    if entry.default is None:
        labels = [label for label in labels if not label.startswith("--no-")]
    for shown, plain in _METAVARS.items():
        labels = [label.replace(shown, plain) for label in labels]
    lines = [""]
    for label in labels:
        joined = f"{lines[-1]} {label}".strip()
        if len(joined) > _NAME_WIDTH and lines[-1]:
            lines.append(f"  {label}")
        else:
            lines[-1] = joined
    return "\n".join(lines)


def _description(entry: HelpEntry) -> Any:
    """What the docstring says, then the choices and the default."""
    from rich.text import Text

    if (text := entry.description) is None:
        return ""
    if entry.choices:
        text.append(Text(f"[{'|'.join(entry.choices)}]", "cyan"))
    if entry.default not in (None, "True"):
        text.append(Text(f"Default: {entry.default}.", "dim"))
    return text


def _settings_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Takes what was not given by a flag or a variable from the file that --config names."""
    for argument in arguments:
        if argument.name == "--config" and argument.tokens:
            path = argument.tokens[0].value
            try:
                settings = config_file.load(path)
            except (OSError, ValueError) as error:
                raise CycloptsError(msg=str(error)) from None
            Dict(settings, source=path, use_commands_as_keys=False)(app, commands, arguments)


def _whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuses a fraction for a whole number, which would be rounded."""
    for argument in arguments:
        kinds = set(_kinds(argument.hint))
        for token in argument.tokens if int in kinds and not kinds & {float, str} else ():
            if not token.value.lstrip("+-").isdecimal():
                raise CycloptsError(msg=f"{argument.name} must be a whole number, got {token.value!r}")


def _kinds(hint: Any) -> list[Any]:
    parts = typing.get_args(hint)
    if not parts:
        return [hint]
    return [
        kind for part in (parts[:1] if typing.get_origin(hint) is typing.Annotated else parts) for kind in _kinds(part)
    ]


def _in_a_line(error: Exception) -> str:
    """Cyclopts checks limits by itself once pydantic is imported, and repeats pydantic's three lines."""
    cause, argument = error.__cause__, getattr(error, "argument", None)
    if argument is None or not hasattr(cause, "errors"):
        return str(error)
    given = " ".join(token.value for token in argument.tokens)
    return f"{argument.field_info.name} must {expected(cause)}, got {given}"


app = App(
    name="omni-jax",
    help="An inference engine in JAX with an OpenAI-compatible server.",
    help_epilogue="Every command has --help with an example.",
    version=lambda: f"omni-jax {version('omni-jax')}",
    config=(Env(ENV_PREFIX, command=False), _settings_file, _whole_numbers),
    default_parameter=Parameter(
        consume_multiple=True,
        allow_repeating=True,  # the last value of a flag wins, as in argparse
        negative_iterable=(),
        show_env_var=False,
        show_default=lambda value: None if value is None or value is False or value == () else str(value),
    ),
    help_formatter=DefaultFormatter(
        column_specs=(
            ColumnSpec(renderer=_names, style="cyan", no_wrap=True),
            ColumnSpec(renderer=_description, overflow="fold"),
        )
    ),
    group_parameters=Group("Options", sort_key=-1),
)
app.register_install_completion_command(name="--install-completion")


def main(arguments: Sequence[str] | None = None) -> typing.NoReturn:
    """Runs a command and exits with its code: 2 for wrong arguments, 1 where the command failed."""
    words = [SHORT_FORMS.get(word, word) for word in (sys.argv[1:] if arguments is None else arguments)]
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except (CycloptsError, ValueError) as error:
        usage_error(_in_a_line(error))
    try:
        sys.exit(command(*bound.args, **bound.kwargs))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

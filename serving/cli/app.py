"""The application: how arguments, environment and a file of settings become the parameters of a command."""

import io
import os
import re
import sys
import typing
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError
from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry

from omni_jax.settings import expected
from serving.cli.options import SHORT_FORMS
from serving.cli.sources import check_tokens, from_file, from_variables
from serving.cli.support import BROKEN_PIPE, INTERRUPTED, usage_error
from serving.cli.vllm_flags import advice

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


def _in_a_line(error: Exception) -> str:
    """Cyclopts checks limits by itself once pydantic is imported, and repeats pydantic's three lines."""
    if isinstance(error, UnknownOptionError) and (instead := advice(error.token.keyword or error.token.value or "")):
        return instead
    if isinstance(error, UnknownOptionError) and re.match(r"-[^-]", error.token.value or error.token.keyword or ""):
        return "unknown option; a value that begins with - must be written as --flag=VALUE"  # it may be a secret
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
    config=(from_variables, from_file, check_tokens),
    default_parameter=Parameter(
        consume_multiple=1,  # at least one
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
    """Runs a command and exits with its code: 2 for wrong arguments (a model that cannot be found among them), 1
    where the command failed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 gets escapes, not a traceback
    try:
        words = _long_forms(sys.argv[1:] if arguments is None else arguments)
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except (CycloptsError, ValueError) as error:
        usage_error(_in_a_line(error))
    try:
        code = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    sys.exit(code)


def _long_forms(words: Sequence[str]) -> list[str]:
    """Writes vLLM's short forms out, up to a --."""
    written = []
    for number, word in enumerate(words):
        if word == "--":
            return [*written, *words[number:]]
        name, equals, value = word.partition("=")
        written.append(f"{SHORT_FORMS.get(name, name)}{equals}{value}")
    return written

"""The command line in this process: what its commands accept, and running them."""

import functools
import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

COMMANDS = ("serve", "generate", "chat", "convert", "check", "describe-images", "ablate", "kv-study", "plan", "version")


def run(*arguments: str) -> tuple[int, str, str]:
    """Run `omni-jax` with these arguments. Returns the exit code, standard output and standard error."""
    from serving.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["omni-jax", *arguments]),
        mock.patch("serving.cli.support.logging.basicConfig"),  # the tests' own logging stays
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue(), err.getvalue()


@functools.cache
def flags(command: str | None) -> frozenset[str] | None:
    """The flags that `command` (None: the program itself) accepts, by its help; None if there is no such command."""
    with mock.patch.dict("os.environ", {"COLUMNS": "240", "TERM": "dumb"}):
        code, out, _ = run(*([] if command is None else [command]), "--help")
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", out)) if code == 0 else None

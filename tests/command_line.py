"""Runs a command of `omni-jax` in this process."""

import contextlib
import dataclasses
import io
import os
from collections.abc import Mapping
from unittest import mock

import pytest

from serving.cli import main as cli


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a command ended and what it printed."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_command(*arguments: object, stdin: str = "", env: Mapping[str, str] | None = None) -> Result:
    """Runs `omni-jax ARGUMENTS` with these variables added to the environment."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        cli.main(list(map(str, arguments)))
    return Result(exit_code=int(end.value.code or 0), stdout=out.getvalue(), stderr=err.getvalue())

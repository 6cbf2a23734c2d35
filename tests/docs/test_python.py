"""docs/python.md has every parameter, output and method of the public API, with the right defaults."""

import dataclasses
import inspect
import re

import pytest

import omni_jax
from omni_jax.memory.recycling import BlockUse
from omni_jax.requests import Completion, RequestOutput, SamplingParams, TokenLogprob
from omni_jax.segments.prompt_view import PromptView
from tests.docs.markdown import ROOT

TEXT = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_sampling_params():
    table = TEXT.partition("## SamplingParams")[2].partition("## Outputs")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    defaults = SamplingParams()
    assert rows == {field.name: str(getattr(defaults, field.name)) for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("kind", [RequestOutput, Completion, TokenLogprob, omni_jax.Score, PromptView, BlockUse])
def test_fields(kind):
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and f"`{kind.__name__}`" in line]
    fields = {field.name for field in dataclasses.fields(kind)}
    assert any(fields <= set(re.findall(r"`(\w+)", row)) for row in rows)


def test_methods_and_names():
    methods = {name for name, _ in inspect.getmembers(omni_jax.LLM, inspect.isfunction) if not name.startswith("_")}
    assert methods == set(re.findall(r"^\| `(\w+)\(", TEXT, re.MULTILINE))
    assert re.search(r"from omni_jax import (.*)", TEXT)[1].split(", ") == omni_jax.__all__

"""Strict JAX for every test: no silent promotion, no silent broadcasting of ranks."""

import os

import hypothesis
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the Hugging Face hub

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


WIDE = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help=f"{WIDE} times the examples of every Hypothesis property")


def pytest_configure() -> None:
    from tests.compilation_cache import keep_slow_programs

    keep_slow_programs()


@pytest.hookimpl(trylast=True)  # after Hypothesis has marked its items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("wide"):
        return
    for holder, name in {_hypothesis_settings(item) for item in items if item.get_closest_marker("hypothesis")}:
        settings = getattr(holder, name)
        setattr(holder, name, hypothesis.settings(settings, max_examples=WIDE * settings.max_examples))


def _hypothesis_settings(item: pytest.Item) -> tuple[object, str]:
    """The object that has the settings of a property, and the attribute."""
    function = item.obj  # type: ignore[attr-defined]
    function = getattr(function, "__func__", function)
    if hasattr(function, "_hypothesis_internal_use_settings"):
        return function, "_hypothesis_internal_use_settings"
    return item.cls, "settings"  # type: ignore[attr-defined]  # a state machine's test case

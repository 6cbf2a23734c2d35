"""Strict JAX for every test: no silent promotion, no silent broadcasting of ranks."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure() -> None:
    from tests.compilation_cache import keep_slow_programs

    keep_slow_programs()

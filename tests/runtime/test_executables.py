"""Jobs are compiled ahead of time, and wrong calls raise errors that name the executable."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from omni_jax.runtime.executables import Job, compile_all
from tests.engines import load_tiny

pytestmark = pytest.mark.smoke


def job(key, function, *shapes, donate=()):
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return Job(key=key, function=function, arguments=arguments, donate=donate)


def test_every_job_is_compiled_and_reported():
    seen = []
    jobs = [job(("double", n), lambda x: x * 2, (n,)) for n in (3, 4, 5)]
    executables = compile_all(jobs, lambda executable, done, total: seen.append((executable.key, done, total)))
    assert set(executables) == {("double", n) for n in (3, 4, 5)}
    assert [(done, total) for _, done, total in seen] == [(1, 3), (2, 3), (3, 3)]
    assert {key for key, _, _ in seen} == set(executables)
    np.testing.assert_array_equal(np.asarray(executables["double", 4](np.ones(4, np.float32))), [2.0] * 4)
    assert all(executable.seconds > 0 for executable in executables.values())


def test_error_for_a_wrong_shape_names_the_executable():
    executable = compile_all([job(("decode", 8), lambda x: x + 1, (8,))])["decode", 8]
    for wrong in (np.ones(9, np.float32), np.ones(8, np.int32), np.ones((8, 1), np.float32)):
        with pytest.raises(TypeError, match=r"\('decode', 8\) was called with other shapes"):
            executable(wrong)
    with pytest.raises(TypeError, match="decode"):
        executable()


def test_error_for_a_wrong_shape_names_an_engines_executable():
    main = load_tiny("main")
    buffer, _ = main.runner.sizes.admit_layout().fresh()
    with pytest.raises(TypeError, match=r"executable \('admit',\)"):
        main.runner._executables["admit",](main.runner._slots, main.runner._tables, buffer[:-1])


def test_a_job_that_cannot_be_compiled_raises_and_ends_all_threads():
    def broken(x):
        raise ValueError("no such kernel")

    threads = threading.active_count()
    with pytest.raises(ValueError, match="no such kernel"):
        compile_all([job(("broken",), broken, (3,)), *(job(("fine", n), lambda x: x + 1, (n,)) for n in range(2, 9))])
    assert threading.active_count() == threads


def test_donated_arguments_are_deleted_by_the_call():
    executable = compile_all([job(("add",), lambda x, y: x + y, (64,), (64,), donate=(0,))])["add",]
    first, second = jax.device_put(np.ones(64, np.float32)), jax.device_put(np.ones(64, np.float32))
    executable(first, second)
    assert first.is_deleted()
    assert not second.is_deleted()

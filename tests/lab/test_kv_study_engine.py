"""kv-study on the real engine with a tiny model."""

import dataclasses

import numpy as np
import pytest

from omni_jax.engine.llm import LLM
from omni_jax.lab.kv_study import Window, measure, parse_plan
from omni_jax.memory.compression import DECAY_START, RAMP_END, RAMP_START, SINKS, WINDOW
from tests import tiny
from tests.engines import SETUPS, compile_tiny, load_tiny, make_engine, sharing

PROMPT, STEPS, COUNT = 70, 60, 5
OFF = parse_plan("off")


@pytest.fixture(scope="module")
def windows():
    length = PROMPT + STEPS + 1
    ids = tiny.prompt(COUNT * length)
    cut = [ids[start : start + length] for start in range(0, COUNT * length, length)]
    return [
        Window(prompt_ids=tuple(w[:PROMPT]), forced_ids=tuple(w[PROMPT:]), document=number)
        for number, w in enumerate(cut)
    ]


@pytest.fixture(scope="module")
def scored(windows):
    """Oracle: log-probabilities of the same texts, scored as prompts."""
    with sharing(load_tiny("main")) as directory:
        scores = LLM(directory).score([[*w.prompt_ids, *w.forced_ids] for w in windows])
    return -np.array([score.logprobs[PROMPT + 1 :] for score in scores])


def test_forced_decode_scores_the_text(windows, scored):
    found = measure(make_engine(load_tiny("main")), OFF, windows)
    assert found.nll == pytest.approx(scored, abs=1e-4)
    assert (found.rows == np.arange(PROMPT + 1, PROMPT + STEPS + 1)).all()
    assert (found.blocks * found.block_size >= found.rows).all()
    assert (found.blocks * found.block_size < found.rows + 2 * found.block_size).all()


@pytest.fixture(scope="module")
def compressing():
    setup = dataclasses.replace(SETUPS["main"], heads=("greedy",))
    return compile_tiny(setup, enable_adaptive_compression=True)


def test_a_fixed_ratio_holds_in_every_step(windows, scored, compressing):
    plan = parse_plan("fixed-0.4")
    found = measure(make_engine(compressing, options=plan.options), plan, windows)
    size, lengths = found.block_size, np.arange(PROMPT + 1, PROMPT + STEPS + 1)
    assert (found.rows >= 0.6 * (lengths - 1)).all()
    assert (found.rows >= SINKS + WINDOW).all()
    # Rows are dropped where that frees a block: at most one block is kept too long.
    assert (found.rows <= 0.6 * lengths + size + 1).all()
    assert (found.blocks == -(-found.rows // size)).all()
    assert np.abs(found.nll - scored).max() > 1e-3  # compression changes the logits


def test_a_cap_below_one_row_drops_nothing(windows, scored, compressing):
    plan = parse_plan("adaptive-0.005")
    found = measure(make_engine(compressing, options=plan.options), plan, windows)
    assert found.nll == pytest.approx(scored, abs=1e-4)


def test_the_default_schedule_drops_nothing_in_the_first_steps(windows, scored, compressing):
    plan = parse_plan("adaptive")
    found = measure(make_engine(compressing, options=plan.options), plan, windows)
    lengths = np.arange(PROMPT + 1, PROMPT + STEPS + 1)
    assert (found.rows[:, : RAMP_START - 1] == lengths[: RAMP_START - 1]).all()
    assert found.nll[:, : RAMP_START - 1] == pytest.approx(scored[:, : RAMP_START - 1], abs=1e-4)
    assert (found.rows[:, RAMP_END:] < 0.75 * lengths[RAMP_END:]).any()
    assert (np.diff(found.rows[:, DECAY_START + 1 :]) == 1).all()  # no drops once the cap is below the share dropped


def test_int8_is_close_to_the_oracle(windows, scored):
    loaded = compile_tiny(dataclasses.replace(SETUPS["main"], heads=("greedy",)), kv_cache_dtype="int8")
    found = measure(make_engine(loaded, options={"kv_cache_dtype": "int8"}), parse_plan("int8"), windows)
    plain = load_tiny("main").info
    assert found.block_bytes / (plain.kv_cache_bytes // plain.num_blocks) == (16 + 4) / 64  # heads of 16 in float32
    assert np.abs(found.nll - scored).max() > 1e-6
    assert found.nll.mean() == pytest.approx(scored.mean(), rel=0.01)

"""The demo model, SmolLM2-135M-Instruct, through the whole engine. Known answers: tests/goldens/README.md.

Skipped if the model is missing: `python -m checkpoints.demo_model` fetches it, as `make test` does.
"""

import os
from pathlib import Path
from unittest import mock

import pytest

from checkpoints import demo_model
from omni_jax import LLM, SamplingParams
from omni_jax.engine import loading
from omni_jax.runtime import runner
from omni_jax.scheduling.buckets import Buckets
from tests.compilation_cache import CACHE, one_process_at_a_time

PARAGRAPH = """\
The water cycle describes how water moves on, above and below the surface of the Earth. Water evaporates from
the oceans, lakes and rivers, and rises into the atmosphere as vapour. As the air cools, the vapour condenses
into tiny droplets that form clouds. When the droplets become too heavy, they fall back to the ground as rain,
snow or hail. Some of this water flows over the land into streams and rivers, which carry it back to the sea.
The rest soaks into the soil, where plants take it up through their roots and release it again through their
leaves. Because the same water is used over and over, the total amount of water on Earth hardly changes.
People depend on this cycle for drinking water, for farming and for making electricity, so it is important to
keep rivers and lakes clean.""".replace("\n", " ")

TABLE = """\
| City | Population |
|---|---|
| Paris | 2100000 |
| Rome | 2800000 |

What is the population of Rome?"""


def directory() -> Path:
    given = os.environ.get("OMNI_JAX_DEMO_MODEL")
    return Path(given) if given else demo_model.default_cache_dir() / demo_model.LAYOUT / demo_model.NAME


@pytest.fixture(scope="module")
def llm():
    model = directory()
    if not (model / "config.json").exists():
        pytest.skip(f"the demo model is not in {model}: fetch it with `python -m checkpoints.demo_model`")
    buckets = Buckets(decode=(2,), mixed=(128,))  # few programs: thirty layers take long to compile
    with (
        one_process_at_a_time(),
        mock.patch.object(loading, "default_buckets", return_value=buckets),
        mock.patch.object(runner, "VARIANTS", ("greedy",)),
    ):
        return LLM(
            model,
            max_num_seqs=2,
            max_num_batched_tokens=128,
            max_model_len=512,
            kv_cache_memory_bytes=1 << 28,
            dtype="float32",
            compilation_cache_dir=CACHE,
        )


def test_the_capital_of_france(llm):
    assert llm.tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    [output] = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=16))
    assert output.outputs[0].token_ids[0] == 7042
    expected = (7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33)
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].text == " Paris.\n\nThe answer is: 2018-01"


def test_nll_of_an_english_paragraph(llm):
    """Query and key rows left in GGUF's order give fluent text too, but about twice the NLL."""
    [score] = llm.score(PARAGRAPH)
    assert len(score.token_ids) == 164
    assert score.mean_nll < 2.2
    assert score.mean_nll == pytest.approx(1.953, abs=2e-3)


def test_a_question_about_a_table(llm):
    [output] = llm.chat([{"role": "user", "content": TABLE}], SamplingParams(temperature=0.0, max_tokens=24))
    assert "2800000" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"

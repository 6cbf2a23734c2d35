"""The planner's estimate of the memory of programs against XLA's figures for a GPU that is not present."""

import numpy as np
import pytest

from kernels_pallas import aot
from omni_jax.cost.published import published_config
from omni_jax.models.config import model_config
from omni_jax.planner.compiled import compiled_programs
from omni_jax.planner.memory import Settings, estimated_programs

pytestmark = [
    pytest.mark.gpu_proof,
    pytest.mark.skipif(aot.available() is not None, reason=f"cannot compile for GPUs: {aot.available()}"),
    # JAX above 0.10 warns about the kernels that the engine uses.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def test_the_estimate_is_at_least_the_compiled_size_and_at_most_twice():
    gpu, devices = "h100", 2
    model = model_config(published_config("Qwen2-0.5B"))
    settings = Settings(
        max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=4096, block_size=16, dtype=np.dtype("bfloat16")
    )
    seen = []
    compiled = compiled_programs(model, settings, devices, gpu, progress=lambda *report: seen.append(report))
    estimated = estimated_programs(model, settings, devices)
    assert [name for name, _, _ in seen] == ["mixed 4096", "decode 8", "score 4096", "head 8 full"]
    assert (compiled.source, estimated.source) == ("compiled", "estimated")
    assert compiled.largest == estimated.largest == "mixed 4096"
    assert 0.95 * compiled.temporaries <= estimated.temporaries <= 2 * compiled.temporaries
    assert estimated.results == pytest.approx(compiled.results, rel=0.02)

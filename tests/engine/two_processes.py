"""One of two processes that share a model, two virtual devices each; test_processes.py starts both.

python -m tests.engine.two_processes PROCESS_ID PORT MODE

Modes: "answer" generates and stops; "die" kills the follower during generation, "die-front" the front.
"""

import json
import logging
import os
import sys
from unittest import mock

from omni_jax import LLM
from omni_jax.engine import loading
from omni_jax.engine.follower import follow
from omni_jax.requests import SamplingParams
from omni_jax.runtime import runner as runner_module
from omni_jax.runtime.runner import Runner
from omni_jax.scheduling.buckets import Buckets
from tests import tiny
from tests.engines import Setup, checkpoint

SETUP = Setup(variant="eight_heads", decode=(8,), mixed=(64,))
PROMPTS = [tiny.prompt(n) for n in (1, 20, 70)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0),
]


def options(process_id: int, port: int) -> dict:
    return {
        "tensor_parallel_size": 4,
        "coordinator_address": f"127.0.0.1:{port}",
        "num_processes": 2,
        "process_id": process_id,
    }


def answers(llm: LLM) -> list:
    [generated, scored] = [llm.generate(PROMPTS, params) for params in SAMPLINGS]
    return [
        [list(output.outputs[0].token_ids) for output in generated],
        [[round(entry.logprob, 4) for entry in output.prompt_logprobs[1:]] for output in scored],
    ]


def main() -> None:
    process_id, port, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = SETUP.config(checkpoint(SETUP.variant), **options(process_id, port))
    with (
        mock.patch.object(loading, "default_buckets", return_value=Buckets(decode=SETUP.decode, mixed=SETUP.mixed)),
        mock.patch.object(runner_module, "VARIANTS", SETUP.heads),
    ):
        if process_id:
            if mode == "die":
                calls, do = [], Runner.do

                def dying(self, operation, *rest):
                    calls.append(operation)
                    if self.mesh.is_multi_process and calls.count("body") == 4:
                        os._exit(9)
                    return do(self, operation, *rest)

                Runner.do = dying
            follow(config)
            return
        llm = LLM(**{field: getattr(config, field) for field in config.__dataclass_fields__})
        if mode == "die-front":
            stream = llm.stream(PROMPTS[0], SAMPLINGS[0])
            next(stream)
            os._exit(9)
        sys.stdout.write(f"ANSWERS {json.dumps(answers(llm))}\n")
        llm.engine.close()


if __name__ == "__main__":
    main()

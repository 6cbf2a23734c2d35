"""Contenders llama.cpp, OpenVINO GenAI and vLLM, if installed, each used as in its own examples.

Each needs the model in its format: llama.cpp a GGUF file, OpenVINO a directory exported by optimum-cli, vLLM the
Hugging Face directory.
"""

import argparse
import ctypes
import os
import time

from benchmarks.worker import serve


class LlamaCpp:
    """llama_decode over a batch, with the default half-precision cache, and argmax in numpy."""

    BATCH = 2048

    def __init__(self, model: str, dtype: str):
        import llama_cpp
        import numpy as np

        self._lib, self._np = llama_cpp, np
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise FileNotFoundError(f"llama.cpp cannot load {model}: expected a GGUF file")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)

    def describe(self):
        return {"name": "llama.cpp", "version": f"llama-cpp-python {self._lib.__version__}"}

    def open(self, prompts, room):
        lib, threads = self._lib, os.cpu_count()
        settings = lib.llama_context_default_params()
        settings.n_ctx = len(prompts) * -(-(max(map(len, prompts)) + room + 1) // 256) * 256
        settings.n_batch, settings.n_seq_max = self.BATCH, len(prompts)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, settings)
        self._lengths, self._tokens = [len(p) for p in prompts], [[] for _ in prompts]
        work = [(t, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        begin = time.perf_counter()
        for start in range(0, len(work), self.BATCH):
            self._run(work[start : start + self.BATCH])
        return {"seconds": time.perf_counter() - begin}

    def decode(self, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            made = enumerate(self._tokens)
            self._run([(tokens[-1], self._lengths[s] + len(tokens) - 1, s, True) for s, tokens in made])
        return {"seconds": time.perf_counter() - begin}

    def close(self):
        self._lib.llama_free(self._context)
        return {"tokens": self._tokens}

    def _run(self, work):
        """Run a batch of at most BATCH tuples (token, position, sequence, whether to sample after it)."""
        batch = self._batch
        batch.n_tokens = len(work)
        for i, (token, position, sequence, sample) in enumerate(work):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, sample
            batch.seq_id[i][0] = sequence
        if failed := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        for i, (_, _, sequence, sample) in enumerate(work):
            if sample:
                logits = ctypes.cast(
                    self._lib.llama_get_logits_ith(self._context, i), ctypes.POINTER(ctypes.c_float * self._vocab)
                )
                self._tokens[sequence].append(int(self._np.ctypeslib.as_array(logits.contents).argmax()))


class OpenVINO:
    """ContinuousBatchingPipeline, stepped by hand, with the default cache precision."""

    def __init__(self, model: str, dtype: str):
        import numpy as np
        import openvino
        import openvino_genai

        self._np = np
        self._lib, self._openvino = openvino_genai, openvino
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size, settings.max_num_seqs, settings.enable_prefix_caching = 2, 64, False
        precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": os.cpu_count()}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, settings, "CPU", properties)
        self._next = 0

    def describe(self):
        return {"name": "OpenVINO GenAI", "version": self._lib.__version__}

    def open(self, prompts, room):
        settings = self._lib.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = room + 64, True, False
        inputs = [self._openvino.Tensor(self._np.array([p], self._np.int64)) for p in prompts]
        begin = time.perf_counter()
        self._handles = [self._pipeline.add_request(self._next + i, x, settings) for i, x in enumerate(inputs)]
        self._next += len(prompts)
        self._tokens = [[] for _ in prompts]
        while not all(self._tokens):
            self._step()
        return {"seconds": time.perf_counter() - begin}

    def decode(self, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        return {"seconds": time.perf_counter() - begin}

    def close(self):
        for handle in self._handles:
            handle.cancel() if hasattr(handle, "cancel") else handle.drop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return {"tokens": self._tokens}

    def _step(self):
        self._pipeline.step()
        for handle, tokens in zip(self._handles, self._tokens, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids


class VLLM:
    """LLMEngine in this process, stepped by hand, without prefix caching."""

    def __init__(self, model: str, dtype: str):
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
        import vllm

        self._lib = vllm
        arguments = vllm.EngineArgs(
            model=model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False, disable_log_stats=True
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._next = 0

    def describe(self):
        return {"name": "vLLM", "version": self._lib.__version__}

    def open(self, prompts, room):
        params = self._lib.SamplingParams(temperature=0.0, max_tokens=room + 64, ignore_eos=True, detokenize=False)
        self._tokens = {}
        begin = time.perf_counter()
        for prompt in prompts:
            self._engine.add_request(str(self._next), {"prompt_token_ids": prompt}, params)
            self._tokens[str(self._next)] = []
            self._next += 1
        while not all(self._tokens.values()):
            self._step()
        return {"seconds": time.perf_counter() - begin}

    def decode(self, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        return {"seconds": time.perf_counter() - begin}

    def close(self):
        self._engine.abort_request(list(self._tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"tokens": list(self._tokens.values())}

    def _step(self):
        for output in self._engine.step():
            self._tokens[output.request_id] = list(output.outputs[0].token_ids)


PEERS = {"llama.cpp": LlamaCpp, "openvino": OpenVINO, "vllm": VLLM}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.cpu")
    parser.add_argument("model")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    serve(args.peer, lambda: PEERS[args.peer](args.model, args.dtype))

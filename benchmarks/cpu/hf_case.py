"""Contender transformers: `generate` with PyTorch, sdpa attention and the default cache."""

import argparse
import os
import queue
import threading
import time

from benchmarks.worker import serve


class HuggingFace:
    """A benchmarks.worker.Continuer. `generate` runs in a thread; its stopping criterion, which it calls after each
    token, blocks once the requested number of tokens is reached."""

    def __init__(self, directory: str, dtype: str, threads: int):
        import torch
        import transformers

        self._torch, self._threads = torch, threads
        self._version = f"transformers {transformers.__version__}, torch {torch.__version__}, {threads} threads"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def describe(self):
        return {"name": "transformers", "version": self._version}

    def open(self, prompts, room):
        torch, longest = self._torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        self._prompt, self._resume, self._reached = longest, queue.Queue(), queue.Queue()
        self._left, self._begin, self._stopped = 1, time.perf_counter(), False
        self._thread = threading.Thread(target=self._generate, args=(ids, mask, room + 1), daemon=True)
        self._thread.start()
        return {"seconds": self._wait()}

    def decode(self, steps):
        self._left, self._begin = steps, time.perf_counter()
        self._resume.put("go on")
        return {"seconds": self._wait()}

    def close(self):
        self._stopped = True
        self._resume.put("stop")
        self._thread.join()
        return {"tokens": self._output[:, self._prompt :].tolist()}

    def _generate(self, ids, mask, room):
        try:
            self._torch.set_num_threads(self._threads)  # OpenMP keeps the number by thread
            with self._torch.inference_mode():
                self._output = self._model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=room,
                    min_new_tokens=room,
                    do_sample=False,
                    pad_token_id=0,
                    stopping_criteria=[self._after_token],
                )
        except Exception as error:  # passed to the thread that waits for tokens
            self._reached.put(error)
            raise

    def _after_token(self, ids, scores, **_):
        self._left -= 1
        if not self._left:
            self._reached.put(time.perf_counter() - self._begin)
            self._resume.get()
        return self._torch.full((ids.shape[0],), self._stopped)

    def _wait(self):
        found = self._reached.get()
        if isinstance(found, Exception):
            raise RuntimeError("generate failed") from found
        return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.cpu")
    parser.add_argument("directory")
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    serve("transformers", lambda: HuggingFace(args.directory, args.dtype, os.cpu_count() or 1))

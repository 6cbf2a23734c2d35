"""vLLM's flags that this engine does not have: what to use instead.

Flags that change nothing here, such as --enforce-eager, are settings that say so. These would change something in vLLM,
so they are refused: leaving them out in silence would serve another model than was asked for.
"""

_TOOLS = "tool calls and reasoning are not parsed: they are in the text of the answer"
_COMPILED = "steps are compiled at the start for a few sizes, without further settings"
_LORA = "LoRA adapters are not supported: merge the adapter into the weights"

_INSTEAD = {
    "--compilation-config": _COMPILED,
    "--cpu-offload-gb": "weights stay on the devices, and --tensor-parallel-size shares them",
    "--disable-log-stats": "statistics are not logged; they are at /metrics and /stats",
    "--distributed-executor-backend": "the devices of a process are used as they are; several machines need "
    "--coordinator-address",
    "--enable-auto-tool-choice": _TOOLS,
    "--enable-log-requests": "prompts are never logged; --debug-print-batch logs the token ids of each step",
    "--enable-lora": _LORA,
    "--enable-reasoning": _TOOLS,
    "--guided-decoding-backend": "structured outputs are not supported",
    "--kv-transfer-config": "the KV cache is not shared between servers",
    "--lora-modules": _LORA,
    "--max-logprobs": "up to 20 logprobs can be asked for",
    "--max-seq-len-to-capture": _COMPILED,
    "--quantization": "weights have the type of --dtype; --kv-cache-dtype int8 makes the KV cache smaller",
    "--reasoning-parser": _TOOLS,
    "--runner": "only text generation is served",
    "--speculative-config": "speculative decoding is not supported",
    "--ssl-certfile": "TLS needs a proxy in front of the server",
    "--ssl-keyfile": "TLS needs a proxy in front of the server",
    "--task": "only text generation is served",
    "--tokenizer-mode": "the tokenizer is always that of tokenizer.json",
    "--tool-call-parser": _TOOLS,
    "--uvicorn-log-level": "use --log-level",
}


def advice(flag: str) -> str | None:
    """What to do instead of a flag of vLLM, in a line; None for any other flag."""
    name = flag.partition("=")[0].replace("_", "-")
    return f"{name} is a flag of vLLM that omni-jax does not have: {_INSTEAD[name]}" if name in _INSTEAD else None

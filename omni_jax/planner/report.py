"""Prints a plan for people, and converts it to JSON for programs."""

import dataclasses
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from omni_jax.planner.plan import Plan
from omni_jax.planner.speed import Speed

BAR = 24  # characters of the bar of a whole device


def as_json(plan: Plan) -> dict[str, Any]:
    """Return every field of the plan by name. Sizes are in bytes, times in seconds, dtypes are names."""
    found = dataclasses.asdict(plan, dict_factory=_plain)
    return found | {"mesh": plan.mesh}


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, np.dtype) else value for name, value in items}


def show(plan: Plan, name: str, console: Console, *, served: str) -> None:
    """Print a plan. `served` is what `omni-jax serve` calls the model: a directory or a repository's name."""
    console.print(_verdict(plan, name), soft_wrap=True)
    console.print()
    console.print(_memory(plan))
    console.print(_cache(plan), soft_wrap=True)
    if plan.speed is not None:
        console.print()
        console.print(_speed(plan, plan.speed))
        console.print()
        console.print(
            f"start it with: omni-jax serve {shlex.join([served, *plan.serve_flags])}", soft_wrap=True, highlight=False
        )
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)


def _verdict(plan: Plan, name: str) -> Text:
    what = f"{name} ({plan.architecture}, {plan.parameters / 1e9:.2f} billion parameters)"
    where = f"{plan.num} x {plan.gpu}, mesh {plan.mesh}"
    if plan.fits:
        return Text.assemble(("FITS", "bold green"), f"  {what} on {where}")
    text = Text.assemble(("DOES NOT FIT", "bold red"), f"  {what} on {where}: {_missing(plan)}")
    if not plan.remedies:
        return text.append("\nNone of these makes it fit: more or larger GPUs, int8, a shorter context.")
    text.append("\nEach of these lines would make it fit:")
    for remedy in plan.remedies:
        text.append(f"\n  {remedy.flags}  ({remedy.requests} full-length request(s) a replica)")
    return text


def _missing(plan: Plan) -> str:
    memory, settings = plan.memory, plan.settings
    if not plan.tokens:
        return f"a device lacks {_gb(max(0, -memory.free))}, without any KV cache"
    return f"the KV cache holds {plan.tokens:,} tokens, fewer than a request of {settings.max_model_len:,}"


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = Table(title=f"memory of each device: {_gb(memory.total)}", title_justify="left", box=None)
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("GB", justify="right")
    table.add_column(f"{'share':<{BAR}}", no_wrap=True)
    rows = [
        ("weights", memory.weights),
        ("KV cache", memory.kv_cache),
        (f"temporaries ({plan.programs.source})", memory.temporaries),
        ("results of two steps", memory.results),
        ("image features", memory.features),
        ("sequence state", memory.state),
        ("free", max(0, memory.free)),
        ("reserved", memory.reserved),
    ]
    for what, nbytes in rows:
        share = nbytes / memory.total
        bar = "█" * min(BAR, round(BAR * share)) or ("▏" if nbytes else "")
        table.add_row(what, f"{nbytes:,}", f"{nbytes / 1e9:.2f}", f"{bar} {share:.1%}")
    return table


def _cache(plan: Plan) -> str:
    settings, memory = plan.settings, plan.memory
    typical = "" if plan.speed is None else f", {plan.typical_requests:,} of the typical length"
    return (
        f"KV cache of a replica: {memory.num_blocks:,} blocks of {settings.block_size} tokens "
        f"({memory.block_bytes:,} bytes on each device) = {plan.tokens:,} tokens; "
        f"{plan.full_requests:,} requests of {settings.max_model_len:,} tokens{typical}"
    )


def _speed(plan: Plan, speed: Speed) -> Group:
    decode = Table(title="decode step, milliseconds", title_justify="left", box=None)
    decode.add_column("rows \\ context", justify="right")
    contexts = list(dict.fromkeys(step.context for step in speed.decode))
    for context in contexts:
        decode.add_column(f"{context:,}", justify="right")
    cells = {(step.rows, step.context): f"{1e3 * step.seconds:.1f} {step.bound[0]}" for step in speed.decode}
    for rows in sorted({step.rows for step in speed.decode}):
        decode.add_row(f"{rows}", *(cells.get((rows, context), "-") for context in contexts))

    prefill = Table(title="prompt on an idle engine", title_justify="left", box=None)
    for column in ("tokens", "ms to the first token", "tokens/s", ""):
        prefill.add_column(column, justify="right")
    for step in speed.prefill:
        prefill.add_row(
            f"{step.tokens:,}", f"{1e3 * step.seconds:.1f}", f"{step.tokens / step.seconds:,.0f}", step.bound
        )
    return Group(
        decode, "c: compute-bound, m: memory-bound, -: does not fit the cache", "", prefill, "", *_lines(plan, speed)
    )


def _lines(plan: Plan, speed: Speed) -> Iterator[str]:
    for each in speed.all_reduce:
        yield (
            f"all-reduce of {each.what}: {each.nbytes / 1e6:.2f} MB, {1e6 * each.seconds:.0f} us; "
            f"{speed.all_reduces_per_step} in each step"
        )
    bounds = (f"{'no batch' if b.rows is None else f'{b.rows:,} rows'} at {b.context:,}" for b in speed.compute_bound)
    yield f"decode is compute-bound from (by context of each row): {', '.join(bounds)}"
    if speed.image_seconds is not None:
        yield f"an image of one megapixel: {1e3 * speed.image_seconds:.0f} ms in the vision tower"
    first, last = (f"{1e3 * seconds:.1f} ms" for seconds in (speed.full_step_seconds, speed.longest_step_seconds))
    yield (
        f"a full step of {plan.settings.max_num_batched_tokens:,} tokens: {first} at the beginning of a prompt, "
        f"{last} at the end of one of {plan.settings.max_model_len:,} tokens, the longest that prompts of other "
        "requests delay a stream"
    )
    typical = speed.typical
    yield (
        f"requests of {typical.prompt_tokens:,} + {typical.output_tokens:,} tokens, {speed.running} at once on each of "
        f"{plan.data} replica(s): {speed.output_tokens_per_second:,.0f} tokens/s, {speed.requests_per_second:.1f} "
        f"requests/s; {1e3 * speed.tpot_seconds:.1f} ms from token to token, {1e3 * speed.ttft_seconds:.0f} ms to the "
        "first on an idle engine"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"

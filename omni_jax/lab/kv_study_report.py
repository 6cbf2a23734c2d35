"""Files that `omni-jax kv-study` writes: study.json, kv-study.png, report.md."""

import dataclasses
import io
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_jax.lab.figures import NoMatplotlib, subplots
from omni_jax.lab.kv_study import BASELINE, Measured
from omni_jax.lab.records import write_bytes, write_json
from omni_jax.stats.intervals import Comparison, Interval, compare, over_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

FEW_UNITS = 20  # below this the report warns
GROUP_STEPS = 16  # decode steps averaged in the figure
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Statistics of a plan.

    Attributes:
        plan: name of the plan.
        nll: mean negative log-likelihood of a token, in nats, with its interval over units.
        against: comparison of nll with the baseline's, paired by unit.
        kv_bytes: bytes of the blocks that a sequence holds, averaged over its decode steps.
        saved: saved share of the baseline's kv_bytes.
        rows_saved: saved share of the baseline's rows, so without rounding up to blocks.
        of_bfloat16: bytes of a row, scales included, over those of a bfloat16 row.
    """

    plan: str
    nll: Interval
    against: Comparison
    kv_bytes: float
    saved: float
    rows_saved: float
    of_bfloat16: float


def summarise(results: Sequence[Measured]) -> list[Line]:
    """Return a line for each plan.

    Raises:
        ValueError: the first plan is not the baseline.
    """
    baseline = results[0]
    if baseline.plan != BASELINE:
        raise ValueError(f"the first plan must be {BASELINE}, got {baseline.plan}")
    bfloat16 = baseline.block_bytes * ITEM_BYTES["bfloat16"] / ITEM_BYTES[baseline.dtype]
    return [
        Line(
            plan=found.plan,
            nll=over_runs(_by_unit(found)),
            against=compare(_by_unit(found), _by_unit(baseline)),
            kv_bytes=_held(found),
            saved=1 - _held(found) / _held(baseline),
            rows_saved=1 - float(found.rows.mean() / baseline.rows.mean()),
            of_bfloat16=found.block_bytes / bfloat16,
        )
        for found in results
    ]


def _unit(found: Measured) -> str:
    """Return what counts as one number: the document, whose windows are alike; with a single one, the window."""
    return "document" if len(set(found.documents)) > 1 else "window"


def _by_unit(found: Measured) -> list[float]:
    """Return the mean NLL of each unit."""
    by_window = found.nll.mean(axis=1)
    if _unit(found) == "window":
        return by_window.tolist()
    documents = np.array(found.documents)
    return [float(by_window[documents == document].mean()) for document in dict.fromkeys(found.documents)]


def _held(found: Measured) -> float:
    return float(found.blocks.mean()) * found.block_bytes


def write_results(out: Path, results: Sequence[Measured], facts: Mapping[str, Any]) -> Path:
    """Write all files; `facts` describes the run. Returns the path of the report."""
    lines = summarise(results)
    write_json(
        out / "study.json",
        {
            "facts": facts,
            "unit": _unit(results[0]),
            "plans": [
                _finite(dataclasses.asdict(line))
                | {
                    "machine": found.machine,
                    "block_size": found.block_size,
                    "block_bytes": found.block_bytes,
                    "seconds": round(found.seconds, 2),
                    "nll_by_window": np.round(found.nll.mean(axis=1), 6).tolist(),
                    "nll_by_step": np.round(found.nll.mean(axis=0), 6).tolist(),
                    "rows_by_step": np.round(found.rows.mean(axis=0), 2).tolist(),
                    "blocks_by_step": np.round(found.blocks.mean(axis=0), 3).tolist(),
                }
                for line, found in zip(lines, results, strict=True)
            ],
        },
    )
    caption = ""
    try:
        _write_figure(out / "kv-study.png", results, lines)
        caption = "![likelihood and memory by plan](kv-study.png)"
    except NoMatplotlib as error:
        logger.warning("%s", error)
    write_bytes(out / "report.md", _markdown(results, lines, facts, caption).encode())
    return out / "report.md"


def _finite(value: Any) -> Any:
    """Replace what JSON does not have, bounds that do not exist, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- text -------------------------------------------------------------------------------------------------------------


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of the plans."""
    header = ("plan", "NLL a token", "change", "KV held, MiB", "saved", "rows saved", "bytes of a bf16 row")
    rows = [header, ("---",) * len(header)]
    for line in lines:
        rows.append(
            (
                line.plan,
                f"{line.nll.value:.4f}",
                _change(line),
                f"{line.kv_bytes / 2**20:.2f}",
                _percent(line.saved),
                _percent(line.rows_saved),
                f"{line.of_bfloat16:.3f}",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def sentence(line: Line) -> str:
    """Return a plan's results in one line, for progress."""
    return f"{line.plan}: NLL {line.nll.value:.4f} ({_change(line)}), KV {line.kv_bytes / 2**20:.2f} MiB a sequence"


def _change(line: Line) -> str:
    if line.plan == BASELINE:
        return "-"
    ratio = line.against.ratio
    change = f"{100 * (ratio.value - 1):+.2f} %"
    if not math.isfinite(ratio.low):
        return change
    return f"{change} [{100 * (ratio.low - 1):+.2f}, {100 * (ratio.high - 1):+.2f}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _markdown(results: Sequence[Measured], lines: Sequence[Line], facts: Mapping[str, Any], caption: str) -> str:
    windows, steps = results[0].nll.shape
    unit, units = _unit(results[0]), lines[0].nll.runs
    few = (
        f"**Only {units} {unit}s:** the intervals are rough; use {FEW_UNITS} or more.\n\n" if units < FEW_UNITS else ""
    )
    missing = [plan for plan in facts["plans"] if plan not in {line.plan for line in lines}]
    unfinished = f"**Incomplete:** {', '.join(missing)} have not run.\n\n" if missing else ""
    machines = list(dict.fromkeys("; ".join(f"{k}: {v}" for k, v in found.machine.items()) for found in results))
    scope = {
        "document": f"the {units} documents in which the windows begin, each of which counts once",
        "window": "the windows of one document, which are taken as independent; it does not cover other documents",
    }[unit]
    return f"""# KV cache study: {facts["model"]}

{few}{unfinished}{windows} windows of {facts["text"]}: {facts["prompt_tokens"]} tokens of prompt, then {steps} decode
steps of the engine that take the next token from the text (teacher forcing).
{results[0].dtype} on {results[0].device}, blocks of {results[0].block_size} tokens. {". ".join(machines)}.

{table(lines)}

{caption}

## How to read this

- NLL is the mean negative log-likelihood, in nats, of the next tokens of the decode steps; its exponential is the
  perplexity. The first output token is not counted. A window begins with the BOS if the model's tokenizer adds one.
- The change is against the plan `{BASELINE}`: the geometric mean of the ratios of NLL, paired by {unit}. Brackets hold
  a 95 % interval by Student's t of their logarithms. The unit is the {unit}: {scope}. It does not cover other models
  or other kinds of text. Nothing corrects for the number of plans.
- KV held is the size of one sequence's blocks, averaged over the decode steps; a partly filled block counts whole.
  Saved is the saved share of `{BASELINE}`'s. Rows saved is the same without rounding up to blocks.
- The last column is the bytes of a row, scales included, over those of a bfloat16 row of this model.
- `adaptive` is the engine's default schedule, `adaptive-0.2` the same with that cap, `fixed-0.4` that ratio in every
  step, `+int8` adds a quantised cache.
- `study.json` has the means of every window and of every step.
"""


# -- figure -----------------------------------------------------------------------------------------------------------


def _write_figure(path: Path, results: Sequence[Measured], lines: Sequence[Line]) -> None:
    figure = _figure(results, lines)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130, bbox_inches="tight")
    write_bytes(path, data.getvalue())


def _figure(results: Sequence[Measured], lines: Sequence[Line]) -> "Figure":
    """Draw the change of NLL by memory saved, the rows by decode step, and the change of NLL by decode step."""
    figure, (both, rows, steps) = subplots(1, 3, width=4.4, height=3.6)
    for number, line in enumerate(lines):
        ratio = line.against.ratio
        middle = 100 * (ratio.value - 1)
        spread = [[middle - 100 * (ratio.low - 1)], [100 * (ratio.high - 1) - middle]]
        if line.plan == BASELINE:
            spread = [[0.0], [0.0]]
        both.errorbar(
            [100 * line.saved], [middle], yerr=spread, color=f"C{number}", marker="o", capsize=3, label=line.plan
        )
    both.set(xlabel="KV memory saved, %", ylabel="NLL, % above off", title="cost and savings")
    baseline = results[0].nll.mean(axis=0)
    for number, found in enumerate(results):
        rows.plot(1 + np.arange(found.rows.shape[1]), found.rows.mean(axis=0), color=f"C{number}", label=found.plan)
        if number:
            middles, changes = _by_group(found.nll.mean(axis=0), baseline)
            steps.plot(middles, changes, color=f"C{number}", marker=".")
    rows.set(xlabel="decode step", ylabel="rows of the cache", title="rows held", ylim=(0, None))
    steps.set(xlabel="decode step", ylabel="NLL, % above off", title=f"NLL by step, means of {GROUP_STEPS}")
    for axes in (both, rows, steps):
        axes.grid(alpha=0.3)
    figure.legend(*both.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _by_group(mine: np.ndarray, baseline: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the middle step of each group of GROUP_STEPS, and the change of its mean in per cent."""
    starts = range(0, len(mine), GROUP_STEPS)
    groups = [slice(start, min(start + GROUP_STEPS, len(mine))) for start in starts]
    middles = [(group.start + group.stop + 1) / 2 for group in groups]
    return middles, [100 * float(mine[group].mean() / baseline[group].mean() - 1) for group in groups]

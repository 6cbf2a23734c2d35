"""Results of benchmarks.memory in Markdown, with the verdict on each target. Intervals are over rounds."""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.report import machine_line
from omni_jax.stats.intervals import STATISTICS, Interval, compare, over_runs

TIMES_LOWER = 8.0  # target: mean time to the first token without the prefix cache over that with it
MARGIN = 0.01  # tolerance on used over allocated slots
TITLES = {
    "prefix": "Shared system prompt",
    "oversubscription": "More sequences than the cache holds",
    "slots": "Used over allocated slots",
}


def markdown(document: dict) -> str:
    """Return the machine, and a table for each part."""
    tables = {"prefix": _prefix, "oversubscription": _oversubscription, "slots": _slots}
    lines = [machine_line(document["machine"]), "", f"Model: {document['model']}, float32."]
    for part, found in document["parts"].items():
        lines += ["", f"### {TITLES[part]}", "", *tables[part](found)]
        lines += ["", *(_verdict(target, reached) for target, reached in verdicts({"parts": {part: found}}))]
        if (busiest := _others(found)) > 0.1:
            lines.append(f"Other processes used up to {busiest:.2f} cores.")
    return "\n".join(lines) + "\n"


def verdicts(document: dict) -> list[tuple[str, bool]]:
    """Return (target, whether it was reached) for each target."""
    found = []
    for part, measured in document["parts"].items():
        if part == "prefix":
            for case in measured["cases"]:
                times = times_lower(case).value
                target = f"first token {TIMES_LOWER:g} times sooner with the cache, {case['title']}: {times:.1f} times"
                found.append((target, times > TIMES_LOWER or math.isclose(times, TIMES_LOWER)))
        elif part == "oversubscription":
            failed = sum(answer["failed"] for answers in measured["answers"].values() for answer in answers)
            found.append((f"no request fails: {failed} failed", not failed))
        else:
            ratio, least = slot_ratio(measured), least_slot_ratio(measured)
            found.append((f"used over allocated slots at least {least:.4f}: {ratio:.4f}", ratio >= least))
    return found


# -- shared system prompt ---------------------------------------------------------------------------------------------


def times_lower(case: dict) -> Interval:
    """Return the mean time to the first token without the cache over that with it, paired by round."""
    return _ratio(case["answers"], "first_token_seconds", "without", "with the cache", "mean")


def prefix_line(case: dict) -> str:
    """Return a case in one line, for progress."""
    means = {name: np.mean(_values(answers, "first_token_seconds")) for name, answers in case["answers"].items()}
    times = ", ".join(f"{name} {mean:.3g} s" for name, mean in means.items())
    return f"{case['title']}: first token {times}; {times_lower(case).value:.1f} times"


def _prefix(found: dict) -> list[str]:
    lines = [
        f"A new prompt of {found['system']:,} tokens that all users share, {found['question']} tokens of each user. "
        "Seconds to the first token.",
        "",
        "| users | cache | mean | P95 | mean without / with |",
        "|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        for name, answers in case["answers"].items():
            values = _values(answers, "first_token_seconds")
            users = len(answers[0]["first_token_seconds"])
            ratio = _number(times_lower(case), "{:.1f}") if name == "with the cache" else ""
            mean, p95 = values.mean(), np.percentile(values, 95)
            lines.append(f"| {users}, {case['title']} | {name} | {mean:.3f} | {p95:.3f} | {ratio} |")
    return lines


# -- more sequences than the cache holds ------------------------------------------------------------------------------


def _oversubscription(found: dict) -> list[str]:
    blocks = found["contenders"][0]
    lines = [
        f"{found['sequences']} sequences at once, {found['tokens']:,} tokens in total when they end; the pool holds "
        f"{blocks['blocks'] * blocks['block_size']:,}. Latency to the last token, in seconds: means over rounds, with "
        "95 % intervals by Student's t if there are several; the last column is paired by round.",
        "",
        "| preempted blocks are | rounds | failed | preemptions | blocks out / in | total seconds | mean | P95 | "
        "P95 over auto's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, answers in found["answers"].items():
        mean, p95 = (over_runs(_by_round(answers, "latency_seconds", statistic)) for statistic in ("mean", "p95"))
        ratio = ""
        if name != "auto":
            ratio = _number(_ratio(found["answers"], "latency_seconds", name, "auto", "p95"), "{:.3f}")
        counts = [str(sum(answer[key] for answer in answers)) for key in ("failed", "preemptions")]
        moved = " / ".join(str(sum(answer[key] for answer in answers)) for key in ("blocks_out", "blocks_in"))
        seconds = np.mean([answer["seconds"] for answer in answers])
        lines.append(
            f"| {name} | {len(answers)} | {' | '.join(counts)} | {moved} | {seconds:.1f} | {_number(mean, '{:.1f}')} | "
            f"{_number(p95, '{:.1f}')} | {ratio} |"
        )
    return lines


# -- used over allocated slots ----------------------------------------------------------------------------------------


def slot_ratio(found: dict) -> float:
    """Return the slots that hold a row over the slots of the blocks that sequences hold, over all steps."""
    return found["answer"]["used"] / found["answer"]["allocated"]


def least_slot_ratio(found: dict) -> float:
    """Return the target: on average, only (block_size - 1) / 2 slots of a sequence's last block are unfilled."""
    return 1 - (found["block_size"] - 1) / 2 / found["answer"]["mean_length"] - MARGIN


def _slots(found: dict) -> list[str]:
    answer = found["answer"]
    return [
        f"{found['requests']} requests of the lab's default mix, blocks of {found['block_size']}, over "
        f"{answer['steps']:,} steps.",
        "",
        "| rows a sequence, mean | sequences, mean | used / allocated | target |",
        "|---|---|---|---|",
        f"| {answer['mean_length']:.1f} | {answer['sequences'] / answer['steps']:.1f} | {slot_ratio(found):.4f} | "
        f"{least_slot_ratio(found):.4f} |",
    ]


# -- numbers ----------------------------------------------------------------------------------------------------------


def _values(answers: Sequence[dict], key: str) -> np.ndarray:
    return np.concatenate([answer[key] for answer in answers])


def _by_round(answers: Sequence[dict], key: str, statistic: str) -> list[float]:
    return [STATISTICS[statistic](np.array(answer[key])) for answer in answers]


def _ratio(answers: dict[str, list[dict]], key: str, one: str, other: str, statistic: str) -> Interval:
    mine, theirs = (_by_round(answers[name], key, statistic) for name in (one, other))
    return compare(mine, theirs).ratio


def _number(found: Interval, form: str) -> str:
    value = form.format(found.value)
    return value if math.isnan(found.low) else f"{value} [{form.format(found.low)}, {form.format(found.high)}]"


def _others(found: dict) -> float:
    """Return the number of cores that other processes kept busy in the most disturbed timed round."""
    groups = [case["answers"] for case in found.get("cases", ())] + [found.get("answers", {})]
    rounds = [answer for group in groups for answers in group.values() for answer in answers]
    return max((answer["others"] for answer in rounds), default=0.0)


def _verdict(target: str, reached: bool) -> str:
    return f"{target[0].upper()}{target[1:]}: " + ("**reached**." if reached else "**missed**.")

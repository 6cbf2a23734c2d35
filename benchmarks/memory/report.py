"""What benchmarks.memory measured, as text, with each target reached or not."""

from collections.abc import Sequence

import numpy as np

from benchmarks.report import machine_line
from omni_jax.stats.intervals import STATISTICS, Comparison, Interval, compare, interval, resamples

RESAMPLES = 2000
TIMES_LOWER = 8.0  # mean time to the first token with the prefix cache
MARGIN = 0.01  # of used over allocated slots
TITLES = {
    "prefix": "A system prompt that all share",
    "oversubscription": "More sequences than the cache holds",
    "slots": "Used over allocated slots",
}


def markdown(document: dict) -> str:
    """The machine, and a table for each part."""
    tables = {"prefix": _prefix, "oversubscription": _oversubscription, "slots": _slots}
    lines = [machine_line(document["machine"]), "", f"Model: {document['model']}, float32."]
    for part, found in document["parts"].items():
        lines += ["", f"### {TITLES[part]}", "", *tables[part](found)]
        lines += ["", *(_verdict(target, reached) for target, reached in verdicts({"parts": {part: found}}))]
        if (busiest := _others(found)) > 0.1:
            lines.append(f"Other processes used up to {busiest:.2f} cores.")
    return "\n".join(lines) + "\n"


def verdicts(document: dict) -> list[tuple[str, bool]]:
    """(target, whether it was reached) of everything that has one."""
    found = []
    for part, measured in document["parts"].items():
        if part == "prefix":
            for case in measured["cases"]:
                times = times_lower(case).value
                target = f"first token {TIMES_LOWER:g} times sooner with the cache, {case['title']}, {times:.1f} times"
                found.append((target, times >= TIMES_LOWER))
        elif part == "oversubscription":
            failed = sum(answer["failed"] for answers in measured["answers"].values() for answer in answers)
            found.append((f"no request fails, {failed} did", not failed))
        else:
            ratio, least = slot_ratio(measured), least_slot_ratio(measured)
            found.append((f"used over allocated slots at least {least:.4f}, {ratio:.4f}", ratio >= least))
    return found


# -- a system prompt that all share -----------------------------------------------------------------------------------


def times_lower(case: dict) -> Interval:
    """Mean time to the first token without the cache over that with it, over the same users."""
    return _against(case["answers"], "first_token_seconds", "without", "with the cache", "mean").ratio


def prefix_line(case: dict) -> str:
    """A case in one line, for progress."""
    means = {name: np.mean(_values(answers, "first_token_seconds")) for name, answers in case["answers"].items()}
    told = ", ".join(f"{name} {mean:.3g} s" for name, mean in means.items())
    return f"{case['title']}: first token {told}; {times_lower(case).value:.1f} times"


def _prefix(found: dict) -> list[str]:
    lines = [
        f"A prompt of {found['system']:,} tokens that all users share and nobody has sent before, and "
        f"{found['question']} of each one's own. Seconds to the first token.",
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
        f"{found['sequences']} sequences at once, {found['tokens']:,} tokens in all at their ends; the pool has room "
        f"for {blocks['blocks'] * blocks['block_size']:,}. Latency to the last token, in seconds, with 95 % intervals "
        "over requests; the last column draws the same requests from both.",
        "",
        "| preempted blocks are | rounds | failed | preemptions | blocks out / in | seconds in all | mean | P95 | "
        "P95 over auto's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, answers in found["answers"].items():
        values = _values(answers, "latency_seconds")
        drawn = _drawn(answers, "latency_seconds")
        mean, p95 = (interval(values, STATISTICS[statistic], drawn) for statistic in ("mean", "p95"))
        ratio = ""
        if name != "auto":
            ratio = _number(_against(found["answers"], "latency_seconds", name, "auto", "p95").ratio, "{:.3f}")
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
    """Slots that hold a row over those of the blocks that sequences hold, over all steps."""
    return found["answer"]["used"] / found["answer"]["allocated"]


def least_slot_ratio(found: dict) -> float:
    """What is asked for: the last block of a sequence of any length has (block_size - 1) / 2 slots unfilled on average,
    and nothing else may be."""
    return 1 - (found["block_size"] - 1) / 2 / found["answer"]["mean_length"] - MARGIN


def _slots(found: dict) -> list[str]:
    answer = found["answer"]
    return [
        f"{found['requests']} requests of the laboratory's usual mix, blocks of {found['block_size']}, over "
        f"{answer['steps']:,} steps.",
        "",
        "| rows a sequence, mean | sequences, mean | used / allocated | asked for |",
        "|---|---|---|---|",
        f"| {answer['mean_length']:.1f} | {answer['sequences'] / answer['steps']:.1f} | {slot_ratio(found):.4f} | "
        f"{least_slot_ratio(found):.4f} |",
    ]


# -- numbers ----------------------------------------------------------------------------------------------------------


def _values(answers: Sequence[dict], key: str) -> np.ndarray:
    return np.concatenate([answer[key] for answer in answers])


def _drawn(answers: Sequence[dict], key: str) -> np.ndarray:
    return resamples([len(answer[key]) for answer in answers], count=RESAMPLES, seed=0)


def _against(answers: dict[str, list[dict]], key: str, one: str, other: str, statistic: str) -> Comparison:
    mine, theirs = answers[one], answers[other]
    return compare(_values(mine, key), _values(theirs, key), STATISTICS[statistic], _drawn(mine, key))


def _number(found: Interval, form: str) -> str:
    return f"{form.format(found.value)} [{form.format(found.low)}, {form.format(found.high)}]"


def _others(found: dict) -> float:
    """Cores that other processes kept busy in the most disturbed round of what was timed."""
    groups = [case["answers"] for case in found.get("cases", ())] + [found.get("answers", {})]
    rounds = [answer for group in groups for answers in group.values() for answer in answers]
    return max((answer["others"] for answer in rounds), default=0.0)


def _verdict(target: str, reached: bool) -> str:
    return f"{target[0].upper()}{target[1:]}: " + ("**reached**." if reached else "**missed**.")

"""Writes docs/configuration.md from the settings: `python -m serving.cli.reference`, or with --check compare only."""

import dataclasses
import sys
import types
import typing
from pathlib import Path
from typing import Any

from serving.cli.options import PANELS, SHORT_FORMS, descriptions

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Made by `python -m serving.cli.reference` from the classes of settings. Do not edit. -->

Every setting of `omni-jax serve` has one name, which can be given in four places. The first place that has it wins:

1. a flag: `--max-model-len 4096`;
2. an environment variable: `OMNI_JAX_MAX_MODEL_LEN=4096`;
3. a key in the JSON or YAML file of `--config`: `max_model_len: 4096`;
4. the default in the tables below.

A flag that takes several values takes them in a row, `--api-key KEY1 KEY2`; in a variable they are separated by
spaces, in a file they are a list. A switch is turned off by `--no-...`, or by `false` in a variable or file. A value
that begins with `-` needs `=`: `--api-key=-secret`. The file may also have the keys `model` and `log_level`.

An empty value is an error, and never means "no key" or "no limit". Unknown keys and flags are errors; unknown
`OMNI_JAX_...` variables are warnings. `OMNI_JAX_PORT=tcp://...`, which Kubernetes sets for a service named omni-jax,
is ignored. `chat` and `generate` read the same variables and files, and ignore settings of the server in them; other
commands read neither.

Python has the settings of the engine as arguments: `LLM("MODEL_DIR", max_model_len=4096)`; they are those under
Model, Cache, Scheduling, Several devices, and the first three under Media.

```yaml
# omni-jax serve --config serve.yaml
model: /models/Qwen2-VL-7B-Instruct
served_model_name: [qwen2-vl, qwen]
port: 8000
max_model_len: 16384
scheduling_policy: slo
ttft_ms: 500
limit_mm_per_prompt: {image: 8, video: 1}
```

`omni-jax serve --help` shows the same tables in the terminal.
"""


def page() -> str:
    """The whole page."""
    short = {flag: form for form, flag in SHORT_FORMS.items()}
    parts = [HEAD]
    for title, settings in PANELS.items():
        parts.append(f"\n## {title}\n\n| setting | values | default | meaning |\n|---|---|---|---|\n")
        for kind in settings:
            texts, hints = descriptions(kind), typing.get_type_hints(kind, include_extras=True)
            for field in dataclasses.fields(kind):
                flag = f"--{field.name.replace('_', '-')}"
                names = f"`{flag}`" + (f", `{short[flag]}`" if flag in short else "")
                values = _values(hints[field.name])
                cells = (names, values, _default(field.default), texts[field.name])
                parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return "".join(parts)


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _values(hint: Any) -> str:
    """A type in words: choices, or the kind of value and its limits."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        limits = [_limit(name, value) for bound in parts[1:] for name, value in _bounds(bound)]
        return f"{_values(parts[0])} {' and '.join(filter(None, limits))}"
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin in (typing.Union, types.UnionType):
        kinds = dict.fromkeys(_values(part) for part in parts if part is not type(None))
        return " or ".join(kind for kind in kinds if kind != "text" or "path" not in kinds)
    if origin is tuple:
        return f"{_values(parts[0])}s"
    names = {bool: "switch", int: "whole number", float: "number", str: "text", Path: "path"}
    return names.get(hint, "mapping")


def _bounds(bound: Any) -> list[tuple[str, Any]]:
    """The limits that an annotation such as Ge(1) sets."""
    return [(field.name, getattr(bound, field.name)) for field in dataclasses.fields(bound)]


def _limit(name: str, value: Any) -> str:
    sign = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}[name]
    return "" if value == float("inf") else f"{sign} {value}"


def main() -> int:
    """Returns 1 when --check finds the page out of date."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""docs/metrics.md lists exactly the metrics that the server has, with their types and labels."""

import re
import types

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_jax.memory.accounting import PoolUsage
from omni_jax.telemetry.figures import SECONDS
from omni_jax.telemetry.recorder import Recorder
from tests.docs.markdown import ROOT
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine

TEXT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `((?:vllm|omni_jax):\w+)` \| (\w+) \|(.*?)\|", re.MULTILINE)

POOL = PoolUsage(
    block_size=16,
    total=2,
    free=1,
    cached=0,
    active=1,
    peak_active=1,
    shared=0,
    active_slots={"text": 1},
    unfilled_slots=15,
    evictions={"text": 0},
)


@pytest.fixture
async def families() -> dict[str, tuple[str, set[str]]]:
    """Metric -> its type and labels, of a server whose every metric has a sample."""
    engine = FakeEngine()
    engine._stats.pool, engine._stats.swap = POOL, types.SimpleNamespace(host_bytes=0, disk_bytes=0, lost=0)
    engine._stats.prefix_queries = engine._stats.prefix_hits = {"text": 1}
    engine.totals = types.SimpleNamespace(
        attainment=lambda: {"text": {"ttft": 1.0}},
        histograms=lambda: {("text", "queue"): ([0] * (len(SECONDS) + 1), 0.0)},
        pauses=0,
        preemptions={"blocks": 0},
        swapped={"blocks": 0},
        totals=Recorder().totals,
    )
    async with serving(engine) as client:
        await client.complete()
        async with client.session.get(client.base + "/metrics") as response:
            text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.samples, family.name
        labels = {label for sample in family.samples for label in sample.labels}
        if not family.name.startswith("process_") and not family.name.endswith("_created"):
            assert "model_name" in labels
            found[family.name] = (family.type, labels - {"model_name", "le"})
    return found


def test_the_tables_list_every_metric(families):
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(TEXT)}
    assert listed == families


def test_expressions_use_metrics_that_exist(families):
    for name in re.findall(r"(?:vllm|omni_jax):\w+", TEXT):
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in families or name in families, name

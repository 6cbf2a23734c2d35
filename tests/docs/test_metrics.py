"""docs/metrics.md lists exactly the metrics that the server has, with their types and labels."""

import re
import types

from prometheus_client.parser import text_string_to_metric_families

from omni_jax.engine.stats import EngineStats
from omni_jax.memory import PoolUsage
from omni_jax.telemetry.figures import SECONDS
from serving.http.metrics import Metrics
from tests.docs.markdown import ROOT
from tests.serving.fake_engine import FakeInfo

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


def families() -> dict[str, tuple[str, set[str]]]:
    """Metric -> its type and labels, of a server whose every metric has a sample."""
    stats = EngineStats(
        pool=POOL,
        swap=types.SimpleNamespace(host_bytes=0, disk_bytes=0, lost=0),
        prefix_queries={"text": 1},
        prefix_hits={"text": 0},
    )
    recorder = types.SimpleNamespace(
        attainment=lambda: {"text": {"ttft": 1.0}},
        histograms=lambda: {("text", "queue"): ([0] * (len(SECONDS) + 1), 0.0)},
        pauses=0,
        preemptions={"blocks": 0},
    )
    metrics = Metrics(
        stats=lambda: stats,
        info=FakeInfo(),
        model_name="model",
        recorder=lambda: recorder,
        cuts=lambda: {"request": {"segments": 1}},
    )
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        assert family.samples, family.name
        labels = {label for sample in family.samples for label in sample.labels}
        if not family.name.startswith("process_") and not family.name.endswith("_created"):
            assert "model_name" in labels
            found[family.name] = (family.type, labels - {"model_name", "le"})
    return found


def test_the_tables_list_every_metric():
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(TEXT)}
    assert listed == families()


def test_expressions_use_metrics_that_exist():
    known = families()
    for name in re.findall(r"(?:vllm|omni_jax):\w+", TEXT):
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in known or name in known, name

"""The engine's memory in the API: cache salts, cached tokens, /stats, metrics and resets."""

import pytest

from omni_jax.memory.accounting import PoolUsage
from omni_jax.memory.host_tier import HostTierStats
from tests.serving.http.test_operations import metrics
from tests.serving.http.test_validation import CHAT, COMPLETIONS, HELLO, assert_rejected

BODIES = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "a"}}


@pytest.mark.parametrize("path", BODIES)
async def test_pc_06_cache_salts_reach_the_engine(client, engine, path):
    body = BODIES[path]
    for salt, expected in (("tenant-1", "tenant-1"), ("ř" * 512, "ř" * 512), (" ", " "), (None, "")):
        assert (await client.post(path, body | {"cache_salt": salt}))[0] == 200
        assert engine.requests[-1].cache_salt == expected
    assert (await client.post(path, body))[0] == 200
    assert engine.requests[-1].cache_salt == ""


async def test_pc_06_each_prompt_of_a_completion_has_the_cache_salt(client, engine):
    assert (await client.complete(["a", "b"], cache_salt="s"))[0] == 200
    assert [request.cache_salt for request in engine.requests] == ["s", "s"]


@pytest.mark.parametrize("path", BODIES)
async def test_pc_06_invalid_cache_salts_are_rejected(client, engine, path):
    for salt in ("", "x" * 513, 5, True, ["s"], {}):
        await assert_rejected(client, path, BODIES[path] | {"cache_salt": salt}, param="cache_salt", match="cache_salt")
    assert engine.requests == []


def half(request) -> int:
    return len(request.prompt_ids) // 2


@pytest.mark.parametrize("body", [{}, {"n": 3}])
@pytest.mark.parametrize("path", BODIES)
async def test_usage_has_the_cached_tokens_of_the_prompt(client, engine, path, body):
    """A prompt counts once, whatever its number of choices, and streams have the same usage."""
    body = BODIES[path] | body | {"max_tokens": 5}
    assert (await client.post(path, body))[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    engine.cached = half
    usage = (await client.post(path, body))[1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": half(engine.requests[-1])}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = await client.chunks(path, body | options)
    assert last["usage"] == usage
    assert chunks[-1]["usage"]["prompt_tokens_details"] == usage["prompt_tokens_details"]


async def test_usage_sums_the_prompts_of_a_completion(client, engine):
    engine.cached = half
    prompts = ["the first of them", "another, which is longer than it"]
    _, answer = await client.complete(prompts, n=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(map(half, engine.requests)) > 0


async def test_the_log_has_the_cached_tokens_of_a_request(client, engine, caplog):
    caplog.set_level("INFO")
    engine.cached = lambda request: 7
    await client.chat(n=2)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request chatcmpl")]
    assert "image 0, video 0), 7 cached, generated" in line


async def test_reset_prefix_cache(client, engine):
    for count in (1, 2):
        async with client.session.post(client.base + "/reset_prefix_cache") as response:
            assert (response.status, await response.text(), engine.resets) == (200, "", count)
    engine.dead = "the step failed at /models/fake"
    status, answer = await client.post("/reset_prefix_cache", b"")
    assert (status, answer["error"]["type"], "/models" in str(answer)) == (500, "server_error", False)
    async with client.session.get(client.base + "/reset_prefix_cache") as response:
        assert response.status == 405


POOL = PoolUsage(
    block_size=16,
    total=60,
    free=10,
    cached=20,
    active=30,
    peak_active=44,
    shared=5,
    active_slots={"text": 300, "image": 100, "video": 0, "table": 7},
    unfilled_slots=73,
    evictions={"text": 1, "image": 2, "video": 3, "table": 4},
)
SWAP = HostTierStats(
    host_bytes=1000,
    host_capacity=4000,
    host_parcels=2,
    disk_bytes=500,
    disk_capacity=800,
    disk_parcels=1,
    operations=1,
    stored=9,
    spilled=3,
    loaded=5,
    evicted=1,
    lost=2,
    store_bandwidth=1e9,
    load_bandwidth=None,
    disk_write_bandwidth=None,
    disk_read_bandwidth=2.5e8,
)


def fill(engine) -> None:
    stats = engine._stats
    stats.prefix_queries, stats.prefix_hits = {"text": 100, "image": 50}, {"text": 64, "image": 0}
    stats.blocks_swapped = 4
    stats.blocks_swapped_out, stats.blocks_swapped_in, stats.tokens_dropped = 12, 8, 345
    stats.pool, stats.swap = POOL, SWAP


async def test_stats_of_the_pool_and_swap(client, engine):
    status, stats = await client.get("/stats")
    assert (status, stats["pool"], stats["swap"]) == (200, None, None)
    fill(engine)
    stats = (await client.get("/stats"))[1]
    assert stats["pool"] == {
        "block_size": 16,
        "total": 60,
        "free": 10,
        "cached": 20,
        "active": 30,
        "peak_active": 44,
        "shared": 5,
        "active_slots": {"text": 300, "image": 100, "video": 0, "table": 7},
        "unfilled_slots": 73,
        "evictions": {"text": 1, "image": 2, "video": 3, "table": 4},
        "swapped": 4,
    }
    assert (stats["swap"]["host_bytes"], stats["swap"]["lost"], stats["swap"]["load_bandwidth"]) == (1000, 2, None)
    assert stats["prefix_cache"] == {"queries": {"text": 100, "image": 50}, "hits": {"text": 64, "image": 0}}
    assert (stats["blocks_swapped"], stats["tokens_dropped"]) == ({"out": 12, "in": 8}, 345)
    assert "requests" in stats


async def test_metrics_of_the_memory(client, engine):
    idle = await metrics(client)
    assert idle['vllm:prefix_cache_queries_total{model_name="fake"}'] == 0
    fill(engine)
    samples = await metrics(client)

    def value(name, **labels):
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(({"model_name": "fake"} | labels).items()))
        return samples[f"{name}{{{shown}}}"]

    assert value("vllm:prefix_cache_queries_total") == 150
    assert value("vllm:prefix_cache_hits_total") == 64
    assert value("omni_jax:prefix_cache_queries_total", modality="image") == 50
    assert value("omni_jax:prefix_cache_hits_total", modality="text") == 64
    states = ("free", "cached", "active", "swapped")
    assert [value("omni_jax:kv_blocks", state=state) for state in states] == [10, 20, 30, 4]
    assert [value("omni_jax:kv_slots", content=content) for content in ("text", "table", "unfilled")] == [300, 7, 73]
    assert value("omni_jax:kv_evictions_total", modality="video") == 3
    assert [value("omni_jax:blocks_swapped_total", way=way) for way in ("out", "in")] == [12, 8]
    assert [value("omni_jax:swap_bytes", tier=tier) for tier in ("host", "disk")] == [1000, 500]
    assert value("omni_jax:swap_lost_total") == 2
    assert value("omni_jax:kv_tokens_dropped_total") == 345

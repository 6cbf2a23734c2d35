"""benchmarks.host.load with a small model."""

from benchmarks.host import load
from tests import tiny


def test_every_format_is_converted_loaded_and_in_the_table(tmp_path):
    document = load.measure(tiny.write_tiny(tmp_path / "tiny", "llama"), devices=2, rounds=1)
    rows = load.markdown(document).splitlines()[4:]
    assert [row.split(" | ")[0] for row in rows] == ["| safetensors", "| Orbax", "| Orbax, cut for 2 devices"]
    for kind in document["kinds"]:
        assert kind["loads"][0]["bytes"] == document["bytes"] > 0
        assert kind["loads"][0]["seconds"] > 0

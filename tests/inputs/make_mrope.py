"""Write mrope.json: positions of random mixes of text, images and video, from transformers' get_rope_index.

Needs torch and transformers (the file is from 5.24). The tests only read the file.
"""

import json
import random
import types
from pathlib import Path

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

MODELS = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel}
FPS = (0.6, 1.0, 1.5, 2.0, 3.0, 24.0, 30000 / 1001, 30.0)  # thirds of a second depend on the precision


def case(rng: random.Random) -> dict:
    """One mix. A part is a number of text tokens, the grid of an image, or the grid and fps of a video."""
    model, tokens_per_second = rng.choice(sorted(MODELS)), rng.choice((2, 4, 25))
    parts, kinds, grids, seconds = [], [], {1: [], 2: []}, []
    for _ in range(rng.randint(1, 4)):
        text, kind = rng.randint(1, 9), rng.randint(1, 2)
        grid = (1 if kind == 1 else rng.randint(1, 9), 2 * rng.randint(1, 5), 2 * rng.randint(1, 5))
        fps = rng.choice(FPS)
        parts += [{"text": text}, {"grid": grid} | ({"fps": fps} if kind == 2 else {})]
        kinds += [0] * text + [kind] * (grid[0] * grid[1] * grid[2] // 4)
        grids[kind].append(grid)
        seconds += [2 / fps] * (kind == 2)
    if rng.random() < 0.7:
        text = rng.randint(1, 9)
        parts.append({"text": text})
        kinds += [0] * text
    vision = types.SimpleNamespace(spatial_merge_size=2, tokens_per_second=tokens_per_second)
    stub = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
    stub.get_vision_position_ids = types.MethodType(MODELS[model].get_vision_position_ids, stub)
    # The processor passes the seconds as a float32 tensor.
    timing = {"second_per_grid_ts": torch.tensor(seconds)} if seconds and model == "qwen2_5_vl" else {}
    positions, delta = MODELS[model].get_rope_index(
        stub,
        torch.zeros((1, len(kinds)), dtype=torch.long),
        torch.tensor([kinds]),
        *(torch.tensor(grids[kind]) if grids[kind] else None for kind in (1, 2)),
        **timing,
    )
    return {
        "tokens_per_second": tokens_per_second if model == "qwen2_5_vl" else None,
        "parts": parts,
        "positions": positions[:, 0].tolist(),
        "delta": int(delta),
    }


def main() -> None:
    rng = random.Random(3)
    lines = ",\n".join(json.dumps(case(rng), separators=(",", ":")) for _ in range(40))
    Path(__file__).with_name("mrope.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

"""Make (or with --check compare) the golden outputs of the tiny vision checkpoints, like make.py for the others.

    python tests/goldens/make_vl.py            # writes tests/goldens/<family>.npz
    python tests/goldens/make_vl.py --check    # makes them again and compares; exit code 1 on a difference

Each <family>.npz holds, for each case of tests.tiny_vl.CASES, under "<case>/":
    ids         int16   [T]             the prompt, with one placeholder per feature
    grids       int32   [items, 3]      (steps, rows, columns) of patches of each image or video, in order
    features    float32 [F, hidden]     the tower's features of all items, in the same order
    embed_rows  int32   [rows]          indices in the prompt: ends of each run of placeholders, and their neighbours
    embeds      float32 [rows, hidden]  input of the first text layer there, with features in place of placeholders
    positions   int32   [3, T]          M-RoPE positions (temporal, height, width)
    delta       int32   []              a generated token's position minus its index
    logits      float32 [vocab]         logits at the last position of the prompt
    tokens      int16   [32]            greedy continuation, not stopped at EOS
It also holds weights_sha256 and versions, as in make.py.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests import tiny_vl  # noqa: E402
from tests.goldens import make as text  # noqa: E402
from tests.tiny_vl import Case, ImageItem, VideoItem  # noqa: E402

GREEDY_TOKENS = 32
MODALITIES = {"text": 0, "image": 1, "video": 2}  # transformers' mm_token_type_ids


def weights_digest(family: str) -> str:
    """Digest of everything the goldens depend on, to detect changes of tests/tiny_vl.py without torch."""
    inputs = []
    for case in tiny_vl.CASES.values():
        items = [(item.modality, dataclasses.astuple(item)) for item in case.items]
        inputs.append(str((tiny_vl.expanded_ids(case), items)).encode())
        for item in case.items:
            inputs += [frame.tobytes() for frame in tiny_vl.frames(item)]
    return text.digest(tiny_vl.config(family), tiny_vl.weights(family), inputs)


def load_vl(family: str) -> dict[str, dict[str, np.ndarray]]:
    """The committed goldens of one family: case -> array name -> array."""
    cases = {name: {} for name in tiny_vl.CASES}
    for key, value in text.load(family).items():
        case, _, array = key.partition("/")
        if array:
            cases[case][array] = value
    return cases


def make(family: str) -> dict[str, np.ndarray]:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    models, processors = [], []
    for layout in tiny_vl.LAYOUTS:

        def write(directory, layout=layout):
            tiny_vl.write_tiny_vl(directory, family, layout=layout)
            processors.append(Qwen2VLImageProcessorPil.from_pretrained(directory))

        models.append(text.oracle(write, f"{family} in layout {layout}", "AutoModelForImageTextToText"))
    model, other = (model.state_dict() for model in models)
    if model.keys() != other.keys() or not all(torch.equal(model[name], other[name]) for name in model):
        raise SystemExit(f"{family}: the layouts are not the same model to transformers")
    model = models[0]
    golden = {}
    with torch.no_grad():
        for name, case in tiny_vl.CASES.items():
            made = _case(torch, model, processors[0], f"{family}, {name}", case)
            golden |= {f"{name}/{key}": value for key, value in made.items()}
    return golden | {
        "weights_sha256": np.array(weights_digest(family)),
        "versions": np.array(text.versions()),
    }


def _case(torch, model, processor, name: str, case: Case) -> dict[str, np.ndarray]:
    inputs = _model_inputs(torch, model, processor, case)
    ids = inputs["input_ids"]
    features = _features(torch, model, case, inputs)
    embeds = model.model.language_model.embed_tokens(ids)[0]
    places = (inputs["mm_token_type_ids"][0] != MODALITIES["text"]).nonzero()[:, 0]
    embeds[places] = features  # in order; expanded_ids has one placeholder per feature
    grids = {key: inputs.get(key) for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
    positions, delta = model.model.get_rope_index(ids, inputs["mm_token_type_ids"], **grids)
    first, tokens, gap = _greedy(torch, model, embeds, positions[:, 0])
    if gap < text.SMALLEST_GAP:
        raise SystemExit(f"{name}: top-2 gap {gap:.1e} is below {text.SMALLEST_GAP}")
    _check_against_whole_model(torch, model, name, inputs, first, tokens)
    rows = _edges(places.tolist(), ids.shape[1])
    return {
        "ids": ids[0].numpy().astype(np.int16),
        "grids": np.array([item.grid for item in case.items], np.int32).reshape(-1, 3),
        "features": features.numpy(),
        "embed_rows": np.array(rows, np.int32),
        "embeds": embeds[rows].numpy(),
        "positions": positions[:, 0].numpy().astype(np.int32),
        "delta": np.array(delta.item(), np.int32),
        "logits": first,
        "tokens": np.array(tokens, np.int16),
    }


def _model_inputs(torch, model, processor, case: Case) -> dict:
    """The inputs of transformers' model for a case, without those that it computes itself."""
    ids = torch.tensor([tiny_vl.expanded_ids(case)])
    types = torch.zeros_like(ids)
    types[ids == model.config.image_token_id] = MODALITIES["image"]
    types[ids == model.config.video_token_id] = MODALITIES["video"]
    inputs = {"input_ids": ids, "mm_token_type_ids": types}
    for modality, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in case.items if item.modality == modality]
        if items:
            inputs[pixels] = torch.from_numpy(np.concatenate([_patches(processor, item) for item in items]))
            inputs[grid] = torch.tensor([item.grid for item in items])
    videos = [item for item in case.items if item.modality == "video"]
    if videos and hasattr(model.config.vision_config, "tokens_per_second"):
        inputs["second_per_grid_ts"] = torch.tensor([video.seconds_per_grid for video in videos])
    return inputs


def _patches(processor, item: ImageItem | VideoItem) -> np.ndarray:
    """float32 [patches, channels * frames * patch * patch], from transformers' image processor.

    Its video processor needs torchvision, so the patches of a video step are combined from those of its frames: a patch
    of an image repeats the image for every frame of a step.
    """
    from PIL import Image

    frames = [Image.fromarray(frame) for frame in tiny_vl.frames(item)]
    steps, rows, cols = item.grid
    stills = []
    for frame in frames:
        made = processor(frame)
        if tuple(made["image_grid_thw"][0]) != (1, rows, cols):
            raise SystemExit(f"{item} was resized to a grid of {made['image_grid_thw'][0]}")
        stills.append(made["pixel_values"].reshape(rows * cols, 3, tiny_vl.FRAMES, -1))
    if item.modality == "image":
        return stills[0].reshape(rows * cols, -1)
    stills += stills[-1:] * (steps * tiny_vl.FRAMES - len(stills))
    pairs = zip(stills[::2], stills[1::2], strict=True)
    return np.concatenate([np.stack([a[:, :, 0], b[:, :, 1]], axis=2).reshape(rows * cols, -1) for a, b in pairs])


def _features(torch, model, case: Case, inputs: dict):
    """Features [tokens, hidden] of all images and videos, in prompt order. All images share one call of the tower."""
    queues = {"image": iter(()), "video": iter(())}
    if "pixel_values" in inputs:
        made = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        queues["image"] = iter(made.pooler_output)
    if "pixel_values_videos" in inputs:
        made = model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True)
        queues["video"] = iter(made.pooler_output)
    parts = [next(queues[item.modality]) for item in case.items]
    return torch.cat([torch.zeros(0, model.config.text_config.hidden_size), *parts])


def _greedy(torch, model, embeds, positions):
    """Logits after the prompt, GREEDY_TOKENS greedy tokens, and the smallest gap between the best two logits of a step.

    Without a cache, as in make.py. A new token's position is the largest position before it plus one.
    """
    decoder, first, tokens, gap = model.model.language_model, None, [], np.inf
    for _ in range(GREEDY_TOKENS):
        hidden = decoder(inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False)
        last = model.lm_head(hidden.last_hidden_state[0, -1])
        first = last.numpy().copy() if first is None else first
        best = last.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        embeds = torch.cat([embeds, decoder.embed_tokens(best.indices[:1])])
        positions = torch.cat([positions, (positions.max() + 1).expand(3, 1)], dim=1)
    return first, tokens, gap


def _check_against_whole_model(torch, model, name: str, inputs: dict, first: np.ndarray, tokens: list[int]) -> None:
    """Check the results against transformers' whole model with its own handling of images, positions and cache."""
    attention_mask = torch.ones_like(inputs["input_ids"])
    whole = model(**inputs, attention_mask=attention_mask).logits[0, -1].numpy()
    if not np.allclose(whole, first, rtol=text.TOLERANCE, atol=text.TOLERANCE):
        raise SystemExit(f"{name}: logits differ from the whole model's by {np.abs(whole - first).max():.1e}")
    model.generation_config.eos_token_id = None
    generated = model.generate(
        **inputs, attention_mask=attention_mask, max_new_tokens=GREEDY_TOKENS, do_sample=False, pad_token_id=0
    )[0, inputs["input_ids"].shape[1] :].tolist()
    if generated != tokens:
        raise SystemExit(f"{name}: greedy tokens {tokens}, model.generate gives {generated}")


def _edges(places: list[int], length: int) -> list[int]:
    """First and last index of each run, and the indices beside them."""
    inside = set(places)
    ends = {i for i in places if not {i - 1, i + 1} <= inside}
    return sorted({i + k for i in ends for k in (-1, 0, 1) if 0 <= i + k < length} - (inside - ends))


if __name__ == "__main__":
    sys.exit(text.main(__doc__, tiny_vl.FAMILIES, make))

"""The vision tower against a dense tower in numpy that takes one image at a time, and properties of the layout."""

import dataclasses
import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.models.config import VisionConfig
from omni_jax.models.vision import Block, Merger, PatchBatch, PatchEmbed, attends_fully, rotary_2d, weight_sources
from omni_jax.models.vision_layout import layout, longest_window, window_blocks

pytestmark = pytest.mark.smoke

COMMON = {
    "hidden_size": 32,
    "out_hidden_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "image_token_id": 1,
    "video_token_id": 2,
}
QWEN2 = VisionConfig(
    **COMMON,
    depth=2,
    intermediate_size=64,
    hidden_act="quick_gelu",
    rms_norm=False,
    window_size=None,
    full_attention_layers=(),
    tokens_per_second=None,
)
QWEN25 = VisionConfig(
    **COMMON,
    depth=3,
    intermediate_size=40,
    hidden_act="silu",
    rms_norm=True,
    window_size=16,  # windows of 4 x 4 patches, 2 x 2 merge blocks
    full_attention_layers=(1,),
    tokens_per_second=2.0,
)
CONFIGS = {"qwen2_vl": QWEN2, "qwen2_5_vl": QWEN25}
erf = np.vectorize(math.erf)
PIXELS = {"mean": (0.48, 0.46, 0.41), "std": (0.27, 0.26, 0.28), "rescale_factor": 1 / 255}


def checkpoint(config, seed=0):
    """Random tensors with a checkpoint's names and shapes."""
    rng = np.random.default_rng(seed)
    hidden, wide, middle = config.hidden_size, 4 * config.hidden_size, config.intermediate_size
    shapes = {"patch_embed.proj.weight": (hidden, 3, config.temporal_patch_size, config.patch_size, config.patch_size)}
    gated = config.hidden_act == "silu"
    mlp = {"gate_proj": (middle, hidden), "up_proj": (middle, hidden), "down_proj": (hidden, middle)}
    mlp = mlp if gated else {"fc1": (middle, hidden), "fc2": (hidden, middle)}
    matrices = {"merger.mlp.0": (wide, wide), "merger.mlp.2": (config.out_hidden_size, wide)}
    norms = ["merger.ln_q"]
    for i in range(config.depth):
        matrices |= {f"blocks.{i}.attn.qkv": (3 * hidden, hidden), f"blocks.{i}.attn.proj": (hidden, hidden)}
        matrices |= {f"blocks.{i}.mlp.{name}": shape for name, shape in mlp.items()}
        norms += [f"blocks.{i}.norm1", f"blocks.{i}.norm2"]
    for name, shape in matrices.items():
        shapes |= {name + ".weight": shape, name + ".bias": shape[:1]}
    for name in norms:
        shapes |= {name + ".weight": (hidden,)} | ({} if config.rms_norm else {name + ".bias": (hidden,)})
    return {
        "visual." + name: rng.standard_normal(shape) * (0.2 if len(shape) > 1 else 0.5)
        for name, shape in shapes.items()
    }


def dense_tower(tensors, config, grid, patches):
    """Features of one image, in float64, with masks instead of a sorted layout and tiles."""
    t = {name.removeprefix("visual."): tensor for name, tensor in tensors.items()}
    rows, columns = grid
    merge, heads, size = config.spatial_merge_size, config.num_heads, config.hidden_size // config.num_heads
    place = itertools.product(range(rows // merge), range(columns // merge), range(merge), range(merge))
    row, column = np.array([(r * merge + i, c * merge + j) for r, c, i, j in place]).T

    def linear(x, name):
        return x @ t[name + ".weight"].T + t[name + ".bias"]

    def norm(x, name):
        if not config.rms_norm:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * t[name + ".weight"]
        return x if config.rms_norm else x + t[name + ".bias"]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    channel = (slice(None), None, None, None)
    pixels = patches * PIXELS["rescale_factor"] - np.array(PIXELS["mean"])[channel]
    pixels = pixels / np.array(PIXELS["std"])[channel]
    x = np.einsum("nctij,dctij->nd", pixels, t["patch_embed.proj.weight"])

    speeds = 10000.0 ** -(2 * np.arange(size // 4) / (size // 2))
    turn = np.exp(1j * np.concatenate([row[:, None] * speeds, column[:, None] * speeds], axis=1))[:, None, :]

    def rotated(y):
        turned = (y[..., : size // 2] + 1j * y[..., size // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    for i in range(config.depth):
        qkv = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").reshape(-1, 3, heads, size)
        scores = np.einsum("qhd,khd->hqk", rotated(qkv[:, 0]), rotated(qkv[:, 1])) / np.sqrt(size)
        if config.window_size is not None and i not in config.full_attention_layers:
            side = config.window_size // config.patch_size
            windows = np.stack([row // side, column // side])
            scores[:, (windows[:, :, None] != windows[:, None, :]).any(0)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, qkv[:, 2]).reshape(x.shape)
        x = x + linear(mixed, f"blocks.{i}.attn.proj")
        y, mlp = norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp."
        if config.hidden_act == "silu":
            gate = linear(y, mlp + "gate_proj")
            x = x + linear(gate * sigmoid(gate) * linear(y, mlp + "up_proj"), mlp + "down_proj")
        else:
            y = linear(y, mlp + "fc1")
            x = x + linear(y * sigmoid(1.702 * y), mlp + "fc2")
    x = linear(norm(x, "merger.ln_q").reshape(-1, merge**2 * config.hidden_size), "merger.mlp.0")
    return linear(x * (1 + erf(x / np.sqrt(2))) / 2, "merger.mlp.2")


def modules(config, tensors, dtype=jnp.float32):
    """The tower's modules, filled through the weight map; every tensor is used and every parameter is set."""
    sources, unused = weight_sources(config), set(tensors)
    parts = {"patch_embed.": PatchEmbed(config, dtype), "merger.": Merger(config, dtype)}
    parts |= {f"blocks.{i}.": Block(config, dtype) for i in range(config.depth)}
    for prefix, module in parts.items():
        for path, parameter in nnx.to_flat_state(nnx.state(module)):
            name = prefix + ".".join(map(str, path))
            source = sources.pop(name)
            unused -= set(source.tensors)
            array = source.assemble(tensors.__getitem__, parameter[...].shape, np.dtype(np.float64))
            parameter[...] = jnp.asarray(array, dtype)
    assert not sources
    assert not unused
    return tuple(parts.values())


@functools.partial(nnx.jit, static_argnames=("config",))
def compiled_tower(parts, patches, fields, config):
    batch = PatchBatch(**fields)
    embed, merger, *blocks = parts
    cos, sin = rotary_2d(config, batch.positions)
    x = embed(patches, **PIXELS)
    for block, full in zip(blocks, attends_fully(config), strict=True):
        x = block(x, cos, sin, batch, full=full)
    return merger(x)


def run_tower(config, parts, grids, images, *, slots=160, filler=0):
    """Features of all images in input order, computed in one call of `slots` slots."""
    where = layout(grids, config)
    count = len(where.order)

    def padded(array, fill=0):
        widths = ((0, slots - count),) + ((0, 0),) * (array.ndim - 1)
        return jnp.asarray(np.pad(array, widths, constant_values=fill))

    ranges = ("first", "last", "window_first", "window_last")
    fields = {name: getattr(where, name) for name in ("positions", *ranges)}
    fields = {name: None if array is None else padded(array) for name, array in fields.items()}
    patches = padded(np.concatenate(images)[where.order], filler)
    made = np.asarray(compiled_tower(parts, patches, fields, config).astype(jnp.float32))
    assert np.isfinite(made).all()
    features = np.empty_like(made[: count // config.spatial_merge_size**2])
    features[where.feature_of] = made[: len(features)]
    return features


def random_images(config, grids, seed=0):
    rng, side = np.random.default_rng(seed), config.patch_size
    return [rng.integers(0, 256, (r * c, 3, config.temporal_patch_size, side, side)).astype(np.uint8) for r, c in grids]


GRIDS = {
    "one": [(8, 8)],
    "partial windows": [(6, 10)],
    "one row of blocks": [(2, 14)],
    "several": [(6, 6), (2, 2), (4, 8), (10, 6)],
    "frames": [(6, 4)] * 3,
}


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_tower_equals_the_dense_tower(family, grids):
    config = CONFIGS[family]
    tensors, images = checkpoint(config), random_images(config, grids)
    got = run_tower(config, modules(config, tensors), grids, images)
    want = [dense_tower(tensors, config, grid, image) for grid, image in zip(grids, images, strict=True)]
    np.testing.assert_allclose(got, np.concatenate(want), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_images_equal_single_images(family):
    config, grids = CONFIGS[family], GRIDS["several"]
    parts, images = modules(config, checkpoint(config)), random_images(config, grids)
    together = run_tower(config, parts, grids, images)
    alone = [run_tower(config, parts, [g], [i]) for g, i in zip(grids, images, strict=True)]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_does_not_change_features(family):
    config, grids = CONFIGS[family], GRIDS["several"]
    parts, images = modules(config, checkpoint(config)), random_images(config, grids)
    zeros, bright = (run_tower(config, parts, grids, images, filler=fill) for fill in (0, 255))
    np.testing.assert_array_equal(zeros, bright)


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_is_close_to_the_dense_tower(family):
    config, grids = CONFIGS[family], GRIDS["several"]
    tensors, images = checkpoint(config), random_images(config, grids)
    rounded = {name: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for name, x in tensors.items()}
    got = run_tower(config, modules(config, tensors, jnp.bfloat16), grids, images)
    want = np.concatenate([dense_tower(rounded, config, g, i) for g, i in zip(grids, images, strict=True)])
    assert np.abs(got - want).max() < 0.03 * np.abs(want).max()
    assert np.abs(got - want).mean() < 0.01 * np.abs(want).mean()


def test_full_false_without_windows_in_the_batch_is_an_error():
    config = QWEN2
    x, positions, slots = jnp.zeros((4, 32)), jnp.zeros((4, 2), jnp.int32), jnp.zeros((4,), jnp.int32)
    batch = PatchBatch(positions=positions, first=slots, last=slots)
    with pytest.raises(ValueError, match="full=False"):
        Block(config, jnp.float32)(x, *rotary_2d(config, positions), batch, full=False)


def test_attends_fully():
    assert attends_fully(QWEN2) == (True, True)
    assert attends_fully(QWEN25) == (False, True, False)


def test_mean_and_std_need_one_value_per_channel():
    patches = jnp.zeros((4, 3, 2, 4, 4), jnp.uint8)
    with pytest.raises(ValueError, match="3 channels"):
        PatchEmbed(QWEN2, jnp.float32)(patches, mean=(0.5,), std=(0.5,), rescale_factor=1 / 255)


def test_layout_by_hand():
    """Merge blocks of 2 x 2 patches, windows of 2 x 2 blocks, an image of 2 x 3 blocks and one of one block:

    0 1 | 2      6
    3 4 | 5
    """
    where = layout([(4, 6), (2, 2)], QWEN25)
    assert where.feature_of.tolist() == [0, 1, 3, 4, 2, 5, 6]
    assert where.order.reshape(-1, 4)[:, 0].tolist() == [0, 4, 12, 16, 8, 20, 24]
    assert where.positions.reshape(-1, 4, 2)[4].tolist() == [[0, 4], [0, 5], [1, 4], [1, 5]]
    assert where.first.tolist() == [0] * 24 + [24] * 4
    assert where.last.tolist() == [24] * 24 + [28] * 4
    assert where.window_first.tolist() == [0] * 16 + [16] * 8 + [24] * 4
    assert where.window_last.tolist() == [16] * 16 + [24] * 8 + [28] * 4


sides = st.integers(1, 9).map(lambda blocks: 2 * blocks)
some_grids = st.lists(st.tuples(sides, sides), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(grids=some_grids)
def test_layout_sorts_blocks_by_window(grids):
    where = layout(grids, QWEN25)
    image_of, place = [], []
    for image, (rows, columns) in enumerate(grids):  # input order: block by block
        for r, c, i, j in itertools.product(range(rows // 2), range(columns // 2), range(2), range(2)):
            image_of.append(image)
            place.append((2 * r + i, 2 * c + j))
    count = len(image_of)
    image_of, place = np.asarray(image_of)[where.order], np.asarray(place)[where.order]

    assert sorted(where.order) == list(range(count))
    np.testing.assert_array_equal(where.positions, place)
    np.testing.assert_array_equal(where.order.reshape(-1, 4), where.feature_of[:, None] * 4 + np.arange(4))

    def ranges(*keys):
        runs = [list(run) for _, run in itertools.groupby(range(count), lambda i: tuple(key[i] for key in keys))]
        assert len(runs) == len(set(zip(*keys, strict=True)))  # each range is contiguous
        return [run[0] for run in runs for _ in run], [run[-1] + 1 for run in runs for _ in run]

    images = ranges(image_of.tolist())
    windows = ranges(image_of.tolist(), (place[:, 0] // 4).tolist(), (place[:, 1] // 4).tolist())
    for got, want in zip(
        (where.first, where.last, where.window_first, where.window_last), images + windows, strict=True
    ):
        assert got.dtype == np.int32
        assert got.tolist() == want
    assert (where.window_last - where.window_first).max() <= longest_window(QWEN25)


@settings(max_examples=20, deadline=None)
@given(grids=some_grids)
def test_layout_without_windows_keeps_the_order(grids):
    where, windowed = layout(grids, QWEN2), layout(grids, QWEN25)
    np.testing.assert_array_equal(where.order, np.arange(len(windowed.order)))
    np.testing.assert_array_equal(where.feature_of, np.arange(len(windowed.feature_of)))
    np.testing.assert_array_equal(where.positions[windowed.order], windowed.positions)
    np.testing.assert_array_equal(where.first, windowed.first)
    assert where.window_first is None
    assert where.window_last is None


def test_windows_of_the_real_model():
    real = dataclasses.replace(QWEN25, patch_size=14, window_size=112)
    assert (window_blocks(real), longest_window(real)) == (4, 64)
    assert (window_blocks(QWEN2), longest_window(QWEN2)) == (None, None)


@pytest.mark.parametrize("grid", [(3, 4), (4, 3), (0, 4)])
def test_grid_that_merge_blocks_do_not_fill_is_an_error(grid):
    with pytest.raises(ValueError, match=f"{grid[0]} x {grid[1]} patches.*2 x 2"):
        layout([(4, 4), grid], QWEN2)


def test_layout_without_grids_is_an_error():
    with pytest.raises(ValueError, match="got none"):
        layout([], QWEN2)

"""The functions to compile: body, head, score, admit. Pure; StepSizes has their shapes and layouts. On a mesh each
device runs them on its parts: its attention heads and its part of the vocabulary (see runtime.sharding).

A step is a body and a head. The body embeds the tokens (tokens sampled by the previous step are still on the device),
runs the layers over the paged cache and gathers the hidden states to sample from. The head computes logits and one
token per row. Bodies are compiled by (kind, size) and heads by (rows, variant); any body can precede any head.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention import PagedBatch, PagedKernels, paged_attention, write_kv
from omni_jax.models.axis import ONE_DEVICE, ModelAxis
from omni_jax.models.config import ModelConfig
from omni_jax.models.weights import Split
from omni_jax.requests.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from omni_jax.runtime import sampling
from omni_jax.runtime.packing import Layout
from omni_jax.runtime.state import FREQUENCY, MIN_P, PRESENCE, REPETITION, TEMPERATURE, TOP_P, Pool, SlotState

Variant = Literal["greedy", "sample", "full"]  # each can do what those before it can
VARIANTS: tuple[Variant, ...] = get_args(Variant)
SCORE_CHUNK = 64  # tokens of a scored prompt whose logits are in memory at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes that all executables of an engine share.

    Attributes:
        rows: maximum number of rows of a step.
        slots: slots of state on the device, the padding slot included (the last one).
        pages_per_row: width of the block table.
        block_size: tokens per block.
        vocab_size: logits per row, over all devices.
        reads_media: whether the model takes features of images and has M-RoPE.
        kernels: implementations of attention over the cache.
        axis: the devices that share the model.
    """

    rows: int
    slots: int
    pages_per_row: int
    block_size: int
    vocab_size: int
    reads_media: bool = False
    kernels: PagedKernels = dataclasses.field(default_factory=PagedKernels)
    axis: ModelAxis = ONE_DEVICE

    @property
    def alternatives(self) -> int:
        return min(MAX_LOGPROBS, self.vocab_size)

    def body_layout(self, tokens: int, rows: int) -> Layout:
        """A negative value in `tokens` stands for the last token of slot -value - 1. `kv_len` is the number of cached
        tokens: the tokens so far minus `dropped`. `update_*` add a block to a slot's table. `rotary` holds positions
        for M-RoPE (time, height, width). `feature_row` is 0 for tokens without a feature."""
        ints = jnp.int32
        media = {"rotary": ((3, tokens), ints), "feature_row": ((tokens,), ints)} if self.reads_media else {}
        return Layout(
            fields={
                "row_slot": ((rows,), ints),
                "query_start": ((rows + 1,), ints),
                "kv_len": ((rows,), ints),
                "dropped": ((rows,), ints),
                "sample_at": ((self.rows,), ints),
                "update_slot": ((rows,), ints),
                "update_index": ((rows,), ints),
                "update_block": ((rows,), ints),
                "tokens": ((tokens,), ints),
                **media,
            }
        )

    def head_layout(self, rows: int) -> Layout:
        """`position` is the position of the token to sample; `suppress` is 1 until min_tokens is reached; `forced` is
        a token to take instead of a sampled one, or -1."""
        fields = ("slot", "position", "suppress", "forced")
        return Layout(fields=dict.fromkeys(fields, ((rows,), jnp.int32)))

    def admit_layout(self) -> Layout:
        return Layout(
            fields={
                "slot": ((), jnp.int32),
                "seed": ((2,), jnp.uint32),
                "choice": ((), jnp.int32),
                "numbers": ((6,), jnp.float32),
                "top_k": ((), jnp.int32),
                "bias_ids": ((MAX_LOGIT_BIAS,), jnp.int32),
                "bias_values": ((MAX_LOGIT_BIAS,), jnp.float32),
                "stop_ids": ((MAX_STOP_TOKEN_IDS,), jnp.int32),
                "blocks": ((self.pages_per_row,), jnp.int32),
            }
        )

    def history_layout(self) -> Layout:
        max_tokens = self.pages_per_row * self.block_size
        return Layout(
            fields={
                "slot": ((), jnp.int32),
                "prompt": ((), jnp.int32),
                "known": ((), jnp.int32),
                "tokens": ((max_tokens,), jnp.int32),
            }
        )

    def score_layout(self, tokens: int) -> Layout:
        return Layout(fields={"targets": ((tokens,), jnp.int32)})


def body(decoder: Split, config: ModelConfig, sizes: StepSizes, decode: bool, layout: Layout):
    """(leaves, pool, tables, last_token, packed, features) -> (pool, tables, hidden [sizes.rows, hidden], all hidden
    states [tokens, hidden]).

    Donate the pool and the tables. A decode step returns () instead of all hidden states. `features` [rows, hidden] is
    () for a text-only model.
    """
    block_size = sizes.block_size

    def run(leaves, pool: Pool, tables, last_token, packed, features):
        field = layout.unpack(packed)
        tables = tables.at[field["update_slot"], field["update_index"]].set(field["update_block"])
        given = field["tokens"]
        tokens = jnp.where(given < 0, last_token[jnp.maximum(-given - 1, 0)], given)

        query_start, kv_len = field["query_start"], field["kv_len"]
        rows, count = kv_len.shape[0], given.shape[0]
        token = jnp.arange(count, dtype=jnp.int32)
        if decode:
            row, place, real = token, kv_len - 1, token >= 0
        else:
            row = jnp.searchsorted(query_start[1:], token, side="right", method="compare_all").astype(jnp.int32)
            row = jnp.minimum(row, rows - 1)
            real = token < query_start[-1]
            place = jnp.where(real, kv_len[row] - (query_start[row + 1] - token), 0)
        # `place` is the index in the cache. The position also counts tokens that compression dropped.
        positions = place + field["dropped"][row]
        block_tables = tables[field["row_slot"]]
        page = jnp.where(real, block_tables[row, place // block_size], 0)
        offset = place % block_size
        batch = PagedBatch(query_start=query_start, kv_len=kv_len, block_tables=block_tables, decode=decode)
        pages = list(pool)

        def attend(layer, query, key, value):
            keys, values = write_kv(
                pages[2 * layer],
                pages[2 * layer + 1],
                key,
                value,
                page,
                offset,
                implementation=sizes.kernels.write,
            )
            pages[2 * layer], pages[2 * layer + 1] = keys, values
            return paged_attention(
                query,
                keys,
                values,
                batch,
                scale=config.head_dim**-0.5,
                implementation=sizes.kernels.decode if decode else sizes.kernels.mixed,
            )

        if sizes.reads_media:
            media = (features, field["feature_row"])
            hidden = decoder.merge(leaves)(tokens, field["rotary"], attend, *media, axis=sizes.axis)
        else:
            hidden = decoder.merge(leaves)(tokens, positions, attend, axis=sizes.axis)
        sampled = hidden[field["sample_at"]]
        return tuple(pages), tables, sampled, () if decode else hidden

    return run


def head(sizes: StepSizes, variant: Variant, rows: int):
    """(output matrix, hidden, slots, last_token, history, packed) -> (last_token, history, result [rows, 2 + 2 *
    alternatives]).

    Donate last_token and history; history is () unless the variant is `full`. The columns of the result, as int32: the
    token (-1 if logits were NaN), the bits of its logprob, ids of the alternatives, bits of their logprobs.
    """
    layout, axis = sizes.head_layout(rows), sizes.axis

    def run(output_matrix, hidden, slots: SlotState, last_token, history, packed):
        field = layout.unpack(packed)
        slot = field["slot"]
        logits = logits_of(hidden[:rows], output_matrix)
        top_logits, top_ids = sampling.most_likely(logits, sizes.alternatives, axis)
        if variant == "greedy":
            token = top_ids[:, 0]
        else:
            numbers = slots.numbers[slot]
            wanted = logits
            if variant == "full":
                wanted = sampling.penalise(
                    wanted, history[slot], numbers[:, REPETITION], numbers[:, PRESENCE], numbers[:, FREQUENCY]
                )
                wanted = sampling.bias(
                    wanted,
                    slots.bias_ids[slot],
                    slots.bias_values[slot],
                    slots.stop_ids[slot],
                    field["suppress"] > 0,
                    axis,
                )
            uniform = sampling.uniforms(slots.key[slot], field["position"])
            token = sampling.draw(
                wanted, numbers[:, TEMPERATURE], slots.top_k[slot], numbers[:, TOP_P], numbers[:, MIN_P], uniform, axis
            )
        token = jnp.where(field["forced"] >= 0, field["forced"], token)
        result = _result(logits, token, top_logits, top_ids, axis)
        token = jnp.maximum(result[:, 0], 0)
        last_token = last_token.at[slot].set(token)
        if variant == "full":
            history = history.at[slot, axis.local(token, history.shape[1])].add(2, mode="drop")
        return last_token, history, result

    return run


def score(sizes: StepSizes, tokens: int):
    """(output matrix, all hidden states, packed) -> result [tokens, 2 + 2 * alternatives] of given tokens, in the
    format of `head`. Logits are computed for SCORE_CHUNK tokens at a time.
    """
    layout, axis = sizes.score_layout(tokens), sizes.axis
    chunk = min(SCORE_CHUNK, tokens)

    def run(output_matrix, hidden, packed):
        targets = layout.unpack(packed)["targets"]
        padding = -tokens % chunk
        hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1])
        targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)

        def one(pair):
            logits = logits_of(pair[0], output_matrix)
            top_logits, top_ids = sampling.most_likely(logits, sizes.alternatives, axis)
            return _result(logits, pair[1], top_logits, top_ids, axis)

        return lax.map(one, (hidden, targets)).reshape(tokens + padding, -1)[:tokens]

    return run


def admit(sizes: StepSizes):
    """(slots, tables, packed) -> (slots, tables): write one slot. Donate both."""
    layout = sizes.admit_layout()

    def run(slots: SlotState, tables, packed):
        field = layout.unpack(packed)
        slot = field["slot"]
        key = jax.random.wrap_key_data(field["seed"], impl="threefry2x32")
        key = jax.random.key_data(jax.random.fold_in(key, field["choice"]))
        written = SlotState(
            key=slots.key.at[slot].set(key),
            **{
                name: getattr(slots, name).at[slot].set(field[name])
                for name in ("numbers", "top_k", "bias_ids", "bias_values", "stop_ids")
            },
        )
        return written, tables.at[slot].set(field["blocks"])

    return run


def rebuild_history(sizes: StepSizes):
    """(history, packed) -> history: count the tokens of a sequence's prompt and output, for variant `full`. Donate the
    history."""
    layout = sizes.history_layout()

    def run(history, packed):
        field = layout.unpack(packed)
        place = jnp.arange(field["tokens"].shape[0], dtype=jnp.int32)
        in_prompt = place < field["prompt"]
        in_output = (place >= field["prompt"]) & (place < field["known"])
        row = jnp.zeros((history.shape[1],), jnp.int32)
        tokens = sizes.axis.local(field["tokens"], history.shape[1])
        row = row.at[tokens].max(in_prompt.astype(jnp.int32), mode="drop")
        row = row.at[tokens].add(2 * in_output.astype(jnp.int32), mode="drop")
        return history.at[field["slot"]].set(row)

    return run


def logits_of(hidden, output_matrix):
    """float32 logits of this device's part of the vocabulary. The barrier keeps XLA for CPU from fusing the product
    into each of its users, which would compute it several times."""
    logits = lax.dot_general(hidden, output_matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return lax.optimization_barrier(logits)


def _result(logits, token, top_logits, top_ids, axis):
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    if axis.size > 1:
        normaliser = jax.nn.logsumexp(axis.gather(normaliser), axis=0)
    place = axis.local(jnp.maximum(token, 0), logits.shape[1])
    chosen = jnp.take_along_axis(logits, place[:, None], axis=-1, mode="fill", fill_value=0)[:, 0]
    chosen = axis.sum(chosen) - normaliser
    token = jnp.where(jnp.isfinite(normaliser), token, -1)
    return jnp.concatenate(
        [
            token[:, None],
            lax.bitcast_convert_type(chosen, jnp.int32)[:, None],
            top_ids,
            lax.bitcast_convert_type(top_logits - normaliser[:, None], jnp.int32),
        ],
        axis=1,
    )

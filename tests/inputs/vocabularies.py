"""Small tokenizers of both families, and Hugging Face directories with them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

# Training text that leads to merges across the bytes of a character and across characters.
CORPUS = (
    "2024 2024 2023",
    "The capital of France is Paris. DEFGHIJ stop the word and the wood, a cat and a dog.",
    "今天天气很好，我们去公园。今天天气不好。",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Ďas, ďábel, naïve café.",
    "👨‍👩‍👧 👨‍👩‍👧 🏳️‍🌈 😀😃😄 👩🏽‍🚀",
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\ncall {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Like Qwen2-VL's: parts in order, a placeholder for each image and video, a default system prompt.
VISION_CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """A byte-level BPE with individual digits, like SmolLM2's; it has merges of digits that are never used."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=440,
        show_progress=False,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("   tab")])
    return tokenizer


def vision() -> Tokenizer:
    """byte_level with the special tokens for images and video."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION])
    return tokenizer


def sentencepiece(*, legacy: bool = True) -> Tokenizer:
    """A BPE with `▁` and byte fallback, like Llama 2's; `▁` is added by the normalizer (legacy) or pre-tokenizer."""
    vocab = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))))}
    merges = []
    for char in "▁etaoinshrdlucmfwypvbgkjqxzTFPDEGHIJ.,今天é":
        vocab[char] = len(vocab)
    for word in ("▁the", "▁and", "▁▁▁", "▁capital", "▁Paris", "▁cat", "今天"):
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                vocab[word[: end + 1]] = len(vocab)
                merges.append((word[:end], word[end]))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_directory(directory: Path, tokenizer: Tokenizer, *, chat_template: str | None = CHATML, **config) -> Path:
    """Write the tokenizer files of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory

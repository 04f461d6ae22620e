"""Small tokenizers that differ, and tiny models that read with them."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the sum of twelve and thirty is forty-two, and the sum of one and two is three.",
    "12 + 30 = 42; 1 + 2 = 3; 100 - 58 = 42, ok!",
    "a tokenizer writes a text as tokens and a model reads the tokens one by one, naïvely.",
] * 4


def by_bytes(directory: Path, size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `size` tokens, which puts one of them in front of each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<begin>", "<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    return _saved(tokenizer, directory, bos_token="<begin>", eos_token="<end>")


def by_words(directory: Path) -> PreTrainedTokenizerFast:
    """Train a BPE with bytes for letters that it has not seen, and `_` for spaces, as SentencePiece writes them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "\u2581") for text in CORPUS], trainer)
    return _saved(tokenizer, directory, eos_token="</s>")


def _saved(tokenizer: object, directory: Path, **special: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.save_pretrained(directory)
    return made

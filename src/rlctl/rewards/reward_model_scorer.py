"""A reward model as a scorer: sequence classification with one label, as from `rlctl train rm`. In a run the training
engine computes it, otherwise (`eval`) transformers in float32 on CPUs. All completions of a step are scored at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.model_files import resolve_model
from rlctl.config.user_code import MODEL, UserCode, is_reference
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.texts import trained_texts
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig, ModelConfig

BATCH_TOKENS = 8192
"""Maximum number of tokens of a batch with padding, unless one text has more."""


def reward_model(name: str) -> Path:
    """Return the directory of a reward model `model:PATH`. Raises InputError if missing."""
    model = resolve_model(name.removeprefix(MODEL))
    if model.megatron is not None:
        raise InputError(
            f"Reward {name!r} is a run or a checkpoint, and reward models are loaded with transformers.",
            f"Export it: rlctl convert megatron-to-hf {name.removeprefix(MODEL)} DIR, and name model:DIR.",
        )
    config = read_config(model.directory)
    labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    classes = config.get("architectures") or [""]
    if not classes[0].endswith("ForSequenceClassification") or labels != 1:
        kind = f"a {classes[0]} with {labels} labels" if classes[0].endswith("Classification") else classes[0]
        raise InputError(
            f"Reward {name!r}: {model.directory} is not a reward model, but {kind or 'a model without a class'}.",
            "A reward model is a ...ForSequenceClassification with one label; `rlctl train rm` makes one.",
        )
    return model.directory.absolute()


class ModelTexts:
    """Prompts and completions in the reward model's tokenizer and chat template, without the run's system prompt,
    template and suffix."""

    def __init__(self, name: str, time: str | None = None) -> None:
        from transformers import AutoConfig

        directory, model = Path(name.removeprefix(MODEL)), ModelConfig(chat_template_time=time)
        self._encoder = PromptEncoder.build(load_tokenizer(directory, model), model, DataConfig(), directory)
        limit = getattr(AutoConfig.from_pretrained(directory), "max_position_embeddings", None)
        self._limit = int(limit or 2**31)

    def tokens(self, completion: str, row: PromptRow) -> np.ndarray:
        """Return a text's tokens. Raises InputError for a text that is too long or that the template refuses."""
        answered = PromptRow(row.index, row.where, row.prompt, (completion,), row.fields)
        tokens_T = trained_texts(self._encoder, answered, scored=True)[0].tokens_T
        if len(tokens_T) > self._limit:
            raise InputError(
                f"{row.where}: prompt and completion have {len(tokens_T):,} tokens, and the reward model takes "
                f"{self._limit:,}.",
                "Lower --max-length, or name another reward model.",
            )
        return tokens_T


class ModelScorer:
    """The score of prompt and completion, as transformers computes it."""

    def __init__(self, name: str, time: str | None = None) -> None:
        from transformers import AutoModelForSequenceClassification

        self._texts = ModelTexts(name, time)
        directory = Path(name.removeprefix(MODEL))
        self._model = AutoModelForSequenceClassification.from_pretrained(directory, dtype="float32").eval()

    def score_all(self, completions: Sequence[str], rows: Sequence[PromptRow]) -> list[float | None]:
        """Return the score of each completion. Raises InputError for one that cannot be written or is too long."""
        import torch

        texts = [self._texts.tokens(text, row) for text, row in zip(completions, rows, strict=True)]
        scores: list[float | None] = [None] * len(texts)
        padding = self._model.config.pad_token_id
        with torch.no_grad():
            for batch in _batches([len(text) for text in texts], 1 if padding is None else len(texts)):
                width = max(len(texts[index]) for index in batch)
                tokens = torch.full((len(batch), width), padding or 0)
                seen = torch.zeros_like(tokens)
                for place, index in enumerate(batch):
                    tokens[place, : len(texts[index])] = torch.from_numpy(texts[index])
                    seen[place, : len(texts[index])] = 1
                logits = self._model(input_ids=tokens, attention_mask=seen).logits
                for index, value in zip(batch, logits[:, 0].tolist(), strict=True):
                    scores[index] = value
        return scores


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ends = [0]
    for place, index in enumerate(order):
        count = place - ends[-1]
        if count and (count == most or (count + 1) * lengths[index] > BATCH_TOKENS):
            ends.append(place)
    yield from (order[first:last] for first, last in pairwise([*ends, len(order)]))


def reward_digest(name: str) -> str | None:
    """Return a digest of the file of a reward function, or of a reward model; None for any other scorer."""
    if name.startswith(MODEL):
        return model_fingerprint(reward_model(name))
    return UserCode.read(name, "Reward").fingerprint if is_reference(name) else None

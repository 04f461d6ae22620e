"""Reward models as they are published: sequence classification with one label, whose head is `score.weight`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import read_config, read_generation, read_object
from rlctl.checkpoints.hf.published_tensors import as_published
from rlctl.errors import InputError, listed
from rlctl.models.transformers_classes import built_as
from rlctl.weights.layout import Layout, ParamSpec, whole_piece

SCORE = "score.weight"


def with_score(layout: Layout, spec: ParamSpec) -> Layout:
    """Return a layout with the head as a further tensor."""
    pieces = (*layout.pieces, whole_piece(SCORE, SCORE, spec.shape))
    return replace(layout, params=layout.params | {SCORE: spec}, pieces=pieces)


def scorer_class(config: Mapping[str, Any]) -> str:
    """Return transformers' class for a reward model. Raises InputError if there is none."""
    architecture = built_as(str(config.get("model_type")), "SEQUENCE_CLASSIFICATION")
    if not architecture:
        raise InputError(
            f"transformers has no sequence classification for models of type {config.get('model_type')}, as which a "
            "reward model is exported.",
            "Name a model of another family.",
        )
    return architecture


def scorer_config(companions: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a trained reward model. transformers scores the last token that is not padding, so
    padding must not end texts."""
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    updates = {"architectures": [scorer_class(config)], "pad_token_id": next(_paddings(companions, config), None)}
    return {**config, **labels, **updates}


def _paddings(companions: Path, config: Mapping[str, Any]) -> Iterator[int]:
    """Yield tokens to pad with, the best first."""

    def read(name: str) -> dict[str, Any]:
        return read_object(companions, name) if (companions / name).is_file() else {}

    settings, ends = read("tokenizer_config.json"), set[int]()
    for value in (config.get("eos_token_id"), read_generation(companions).get("eos_token_id")):
        ends |= set(value if isinstance(value, list) else [value])
    added = read("tokenizer.json").get("added_tokens") or []
    texts = {token["content"]: token["id"] for token in added if token.get("special")}
    special = {name: settings.get(f"{name}_token") for name in ("pad", "eos")}
    pad, end = (texts.get(text.get("content") if isinstance(text, dict) else text) for text in special.values())
    ends.add(end)
    pad_tokens = [token for text, token in texts.items() if "pad" in text]
    for token in (config.get("pad_token_id"), pad, *pad_tokens, *texts.values()):
        if isinstance(token, int) and token not in ends and 0 <= token < config.get("vocab_size", 0):
            yield token


def require_loadable(directory: Path, specs: Mapping[str, ParamSpec]) -> None:
    """Raise InputError if transformers' class has other tensors than `specs`."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(directory))
    if different := sorted(as_published(model, model.state_dict()).keys() ^ specs.keys()):
        raise InputError(
            f"{read_config(directory)['architectures'][0]} of transformers has other tensors than this reward model: "
            f"{listed(different)}.",
            "Its checkpoint remains; the model cannot be published as one of transformers.",
        )

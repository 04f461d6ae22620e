"""Stand-ins of a rehearsal: a tiny random model of the same family, a tokenizer, and rows of data."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.model_files import resolve_model
from rlctl.config.files import write_json
from rlctl.data.chat import load_tokenizer
from rlctl.data.holdout import validation_data
from rlctl.data.mixing import source_settings
from rlctl.data.prompt_rows import GYM_PREFIX
from rlctl.data.row_types import RowType
from rlctl.data.templates import PROMPT, template_of
from rlctl.errors import AbsentError, InputError
from rlctl.jobs.new_run import example_rows
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file
from rlctl.planner.result import Plan
from rlctl.processes.child import call_in_child
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import DataConfig, ModelConfig
from rlctl.settings.rewards import RewardConfig
from rlctl.tiny_models.of_transformers import variant_of, write_tiny_class
from rlctl.tiny_models.text import VOCAB_SIZE, tiny_config, write_tiny_model, write_tokenizer
from rlctl.tiny_models.vision import square, write_vision_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_model(
    directory: Path,
    model: ModelConfig,
    plan: Plan,
    facts: ModelFacts | None = None,
    *,
    seed: int = 0,
    scores: bool = False,
) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Write a tiny random model of the family of `facts` (None: the policy's) with the run's tokenizer, or a generated
    one if the run's is unavailable. Return the tokenizer and the reason for a generated one (None: it is the run's).
    `scores`: write a reward model.

    Raises InputError for a reward model of a family without a file.
    """
    facts = facts or plan.facts
    if facts.vision is not None:
        call_in_child("making a tiny model", partial(write_vision_model, directory, facts.vision.kind), quiet=True)
        return load_tokenizer(directory, ModelConfig()), "a generated one, with a processor for small images"
    of_class = "" if has_file(facts.family) else variant_of(facts)
    if scores and of_class:
        raise InputError(
            f"A tiny reward model of {facts.family} cannot be made for a rehearsal: rlctl has no file of this family.",
            "`rlctl train --dry-run` checks the configuration without starting anything.",
        )
    directory.mkdir(parents=True)
    tokenizer, reason = _tokenizer(model)
    stages = plan.training.parallel.pp > 1 and plan.training.parallel.vpp > 1 if plan.training else False
    # The embedding may have more rows than the tokenizer has tokens; a multiple of 8 divides over the tensor ranks.
    vocab = -(-max(facts.vocab, len(tokenizer)) // 8) * 8 if tokenizer is not None else VOCAB_SIZE
    if of_class:
        sizes = {
            "vocab": vocab,
            "max_position_embeddings": facts.max_length,
            "tie_word_embeddings": facts.tied_embeddings,
            "seed": seed,
        }
        call_in_child("making a tiny model", partial(write_tiny_class, directory, of_class, **sizes), quiet=True)
    else:
        write_tiny_model(
            directory, tiny_config(facts, layers=4 if stages else 2, vocab=vocab), seed=seed, scores=scores
        )
    if tokenizer is None:
        write_tokenizer(directory)
        return load_tokenizer(directory, ModelConfig()), reason
    tokenizer.save_pretrained(directory)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    write_json(directory / "generation_config.json", ends)
    return tokenizer, None


def _tokenizer(model: ModelConfig) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    try:
        directory = (
            model.tokenizer
            or resolve_model(
                model.name or "", model.revision, weights=False, trust_remote_code=model.trust_remote_code
            ).directory
        )
        return load_tokenizer(directory, model), None
    except AbsentError as error:
        return None, f"a generated one of {VOCAB_SIZE} tokens, with its own chat template; {error.message}"


def names_of_data(config: RlctlConfig) -> Iterator[tuple[str, DataConfig, RewardConfig]]:
    """Yield (name, data settings, rewards) of each data source, without Reasoning Gym tasks."""
    names = [(settings.data, settings.reward) for settings in source_settings(config)]
    if config.validation.wanted and config.validation.data.name:
        validation = validation_data(config.data, config.validation.data)
        reward = RewardConfig()
        if rollouts := config.rollout_settings:
            terms = rollouts.validation.reward or rollouts.reward.terms
            reward = rollouts.reward.model_copy(update={"terms": terms})
        names.append((validation, reward))
    for data, reward in names:
        if data.name and not data.name.startswith(GYM_PREFIX):
            yield data.name, data, reward


def generated_rows(
    path: Path, data: DataConfig, reward: RewardConfig, rows: RowType, *, plain: bool = False, images: bool = False
) -> None:
    """Write rows with the columns that `data` and the scorers name, to replace unavailable data. `plain`: rows with one
    text; `images`: each row has a drawn image."""
    template = template_of(data)
    others = sorted((template.names if template else frozenset()) - {PROMPT, data.prompt_field})
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(example_rows()):
            question, answer = row["question"], row["answer"]
            made: dict[str, Any] = {name: f"{name} {number}" for name in others} | {data.prompt_field: question}
            if plain:
                made = {"text": f"{question} {answer}"}
            else:
                made |= rows.example(answer, "nobody knows", number, data)
            if any(term.name == "ifeval" for term in reward.terms):
                made |= {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
            if images:
                made["image"] = _drawn(number)
            if data.difficulty_field:
                made[data.difficulty_field.partition(".")[0]] = number
            file.write(json.dumps(made) + "\n")


COLORS = ("red", "green", "blue", "yellow")


def _drawn(number: int) -> str:
    buffer = io.BytesIO()
    square(COLORS[number % len(COLORS)]).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

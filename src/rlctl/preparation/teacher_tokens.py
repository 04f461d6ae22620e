"""Checks of the tokenizers of a policy and its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlctl.backends.base import Teaching
from rlctl.backends.teacher_endpoint import Endpoint
from rlctl.data.chat import load_tokenizer
from rlctl.data.cross_tokens import Projection, require_aligning
from rlctl.data.rollouts import chunk_column
from rlctl.errors import ConfigError, InputError, RlctlError
from rlctl.models.facts import ModelFacts
from rlctl.preparation.open_model import NamedModel
from rlctl.rollouts.dataset import HeldOutTexts, TextStream
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.validation import ValidationSet
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import ModelConfig
from rlctl.settings.other_models import ListedTeacher, owners, owners_of, repeated
from rlctl.training.train_batch import taught_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def require_same_tokens(
    config: RlctlConfig, tokenizer: PreTrainedTokenizerBase, teacher: NamedModel, name: str
) -> None:
    """Raise InputError unless policy and teacher have the same vocabulary and special tokens. Their end-of-turn tokens
    may differ, for example between a base model and its instruct version."""
    theirs = load_tokenizer(teacher.files.directory, ModelConfig(trust_remote_code=config.model.trust_remote_code))
    ours_of, theirs_of = tokenizer.get_vocab(), theirs.get_vocab()
    different = sum(ours_of.get(token) != theirs_of.get(token) for token in ours_of.keys() | theirs_of.keys())
    special = set(tokenizer.all_special_ids) ^ set(theirs.all_special_ids)
    if (different or special) and (model := config.named_teacher):
        difference = (f"{different:,} tokens of their vocabularies differ" if different else
                f"the special tokens differ ({', '.join(map(str, sorted(special)[:5]))})")  # fmt: skip
        raise InputError(
            f"The teacher {name} does not read the tokens of {config.model.name}: {difference}.",
            f"A teacher needs the policy's tokenizer: choose one of the same family.{model.other_tokenizer_hint}",
        )


def endpoint_of(entry: ListedTeacher) -> Endpoint:
    assert entry.endpoint is not None  # `served_teachers` have one
    return Endpoint(
        entry.endpoint, entry.model, entry.api_key_env, entry.timeout_s, entry.retries, entry.concurrency
    )  # fmt: skip


def require_endpoints(config: RlctlConfig, tokenizer: PreTrainedTokenizerBase, facts: ModelFacts, top: int) -> None:
    """Raise InputError for teachers behind an endpoint that cannot give what the loss compares, do not answer, or read
    other tokens. `top`: most likely tokens that are compared at each position."""
    if not config.served_teachers:
        return
    first = min(config.served_teachers)
    if facts.vision is not None:
        raise ConfigError(
            f"teacher.models[{first}].endpoint: a server is sent tokens, and the run's model reads images.",
            "Name a model in its place, or train on text: --set model.images=false.",
        )
    teacher = config.teacher_section
    numbers_of = owners_of(teacher, config.data.source_labels) if teacher is not None else {}
    for number, entry in config.served_teachers.items():
        key = f"teacher.models[{number}].endpoint"
        mixed = teacher is not None and teacher.mix != "divergences" and 0 < top < facts.vocab
        if mixed and any(number in numbers for numbers in numbers_of.values() if len(numbers) > 1):
            raise ConfigError(
                f"{key}: for a mixture of teachers over their likely tokens, each is asked for the log-probs of the "
                "others' tokens, which a server does not give.",
                "Set teacher.mix=divergences, which compares each over its own tokens, or distillation.loss=sampled, "
                "or give its data sources no other teacher.",
            )
        try:
            endpoint_of(entry).require_tokens(tokenizer)
        except RlctlError as error:
            raise type(error)(f"{key}: {error.message}", error.hint) from error


FIRST_ROWS = 1000
"""Rows whose teacher is looked up before the run; for the others the first step with them does."""


def require_owned(config: RlctlConfig, prompts: PromptStream) -> None:
    """Raise InputError for one of the first rows without a teacher (`teacher.field`)."""
    teacher = config.teacher_section
    if teacher is None or teacher.field is None:
        return
    taught = [entry.sources for entry in teacher.models]
    for dataset in prompts.datasets:
        for number in range(min(len(dataset.prompts), FIRST_ROWS)):
            row = dataset.prompts[number]
            if not owners(taught, value := row.field_at(teacher.field)):
                raise InputError(
                    f"{row.where}: no teacher of teacher.models has {teacher.field} = {value!r} (teacher.field).",
                    'Name it in `sources` of one, or give one sources=["*"] for the rest.',
                )


def repeated_teachers(config: RlctlConfig) -> list[str]:
    """Return a line for each teacher that is an earlier one again."""
    teacher = config.teacher_section
    return [] if teacher is None else [
        f"teacher.models[{number}] is teacher.models[{earlier}] again for the same rows, and is computed again; one "
        "entry with the sum of both weights teaches the same"
        for number, earlier in sorted(repeated(teacher, config.data.source_labels).items())
    ]  # fmt: skip


def projections_to(
    config: RlctlConfig,
    prompts: PromptStream,
    validation: ValidationSet | HeldOutTexts | None,
    teachers: Mapping[int, NamedModel],
) -> dict[int, Projection]:
    """Return the projection from the policy's tokens to the tokens of each of `teachers`, which have other tokenizers,
    and set these tokenizers on the text streams. Raises InputError for tokenizers that cannot be aligned."""
    if not teachers:
        return {}
    assert isinstance(prompts, TextStream)  # such teachers read texts
    require_aligning(prompts.encoder.tokenizer, str(config.model.name))
    tokenizers: dict[int, PreTrainedTokenizerBase] = {}
    for number, teacher in teachers.items():
        directory, trusted = teacher.files.directory, ModelConfig(trust_remote_code=config.model.trust_remote_code)
        tokenizers[number] = load_tokenizer(directory, trusted)
        require_aligning(tokenizers[number], teacher.files.label)
    taught = [entry.sources for entry in config.teacher_section.models] if config.teacher_section else []
    for stream in (prompts, *([validation.stream] if isinstance(validation, HeldOutTexts) else [])):
        stream.teachers = tokenizers
        stream.taught_by = (lambda row: owners(taught, taught_as(config, row))) if taught else lambda row: (0,)
    return {number: Projection.between(prompts.encoder.tokenizer, theirs) for number, theirs in tokenizers.items()}


def task_with_tokenizer(number: int, projection: Projection, facts: ModelFacts, top: int) -> Teaching:
    """Return the task of a teacher with its own tokenizer. Its output layer may be padded beyond its tokenizer; padding
    is not a token."""
    vocab = min(projection.teacher_vocab, facts.vocab)
    return Teaching(vocab, min(top, vocab), chunk_column(number))

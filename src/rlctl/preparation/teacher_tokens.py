"""Checks of the tokenizers of a policy and its teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.data.chat import load_tokenizer
from rlctl.data.cross_tokens import Projection, require_aligning
from rlctl.errors import InputError
from rlctl.preparation.open_model import NamedModel
from rlctl.rollouts.dataset import HeldOutTexts, TextStream
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.validation import ValidationSet
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import ModelConfig

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


def projection_to(
    config: RlctlConfig, prompts: PromptStream, validation: ValidationSet | HeldOutTexts | None, teacher: NamedModel
) -> Projection:
    """Return the projection from the policy's tokens to the tokens of a teacher with another tokenizer, and set the
    teacher's tokenizer on the text streams. Raises InputError for tokenizers that cannot be aligned."""
    assert isinstance(prompts, TextStream)  # such teachers read texts
    assert config.named_teacher is not None
    theirs = load_tokenizer(teacher.files.directory, ModelConfig(trust_remote_code=config.model.trust_remote_code))
    for tokenizer, name in ((prompts.encoder.tokenizer, config.model.name), (theirs, config.named_teacher.model)):
        require_aligning(tokenizer, str(name))
    for stream in (prompts, *([validation.stream] if isinstance(validation, HeldOutTexts) else [])):
        stream.teacher = theirs
    return Projection.between(prompts.encoder.tokenizer, theirs)

"""Sections on models next to the policy: teachers and reward models."""

from __future__ import annotations

from typing import Annotated, ClassVar

from rlctl.config.facts import FREE, REHEARSAL_DETAIL, SIZE, Flag
from rlctl.config.section import PathText, Positive, Section


class ModelSizes(Section):
    """The layout of a second model; the planner decides unset values."""

    tp: Annotated[Positive | None, SIZE] = None
    """Tensor parallel size."""
    pp: Annotated[Positive | None, SIZE] = None
    """Pipeline parallel size."""
    cp: Annotated[Positive | None, SIZE] = None
    """Context parallel size."""
    ep: Annotated[Positive | None, SIZE] = None
    """Expert parallel size."""
    etp: Annotated[Positive | None, SIZE] = None
    """Tensor parallel size of the experts."""
    dp: Annotated[Positive | None, SIZE] = None
    """Data parallel size."""


class RewardModelConfig(ModelSizes):
    """The layout of the reward model in `reward.terms` (`model:DIR`). The policy's training backend computes it on the
    policy's devices; the planner decides unset values."""


class TeacherConfig(ModelSizes):
    """The teacher, which provides log-probs of the policy's rollouts. It uses the policy's tokenizer; the policy's
    training backend computes it on the policy's devices."""

    model: Annotated[
        PathText | None,
        FREE | REHEARSAL_DETAIL,
        Flag("teacher", "Teacher model, for --algorithm distillation or `train distill`.", metavar="NAME|DIR"),
    ] = None
    """Local Hugging Face directory, or name on the hub; unset: no teacher."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    other_tokenizer_hint: ClassVar[str] = ""
    """How a teacher with another tokenizer can be used; empty: it cannot."""


class TextTeacherConfig(TeacherConfig):
    """The teacher, which provides probabilities of the texts. The policy's training backend computes it on the policy's
    devices."""

    other_tokenizer_hint: ClassVar[str] = (
        " With plain texts, --set teacher.own_tokenizer=true compares them across tokenizers."
    )

    own_tokenizer: bool = False
    """With plain texts: allow a teacher with another tokenizer. Both models are compared on tokens that cover the same
    characters."""

"""Sections on models next to the policy: teachers and reward models."""

from __future__ import annotations

from rlctl.config.section import PathText, Positive, Section


class ModelSizes(Section):
    """The layout of a second model; unset, the planner decides it."""

    tp: Positive | None = None
    """Tensor parallel size."""
    pp: Positive | None = None
    """Pipeline parallel size."""
    cp: Positive | None = None
    """Context parallel size."""
    ep: Positive | None = None
    """Expert parallel size."""
    etp: Positive | None = None
    """Tensor parallel size of the experts."""
    dp: Positive | None = None
    """Data parallel size."""


class RewardModelConfig(ModelSizes):
    """The layout of the reward model that `reward.terms` name (`model:DIR`). It is computed by the policy's training
    engine on the policy's devices; unset, the planner decides."""


class TeacherConfig(ModelSizes):
    """A second model, whose log-probs of the policy's rollouts are learned from. It has the policy's tokenizer, and is
    computed by the policy's training engine on the policy's devices."""

    model: PathText | None = None
    """Local Hugging Face directory, or name on the hub; unset: there is no teacher."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""


class TextTeacherConfig(TeacherConfig):
    """A second model, whose probabilities of the texts are learned from. It is computed by the policy's training engine
    on the policy's devices."""

    own_tokenizer: bool = False
    """With plain texts: the teacher may have another tokenizer than the policy. It reads the texts with its own, and
    both are compared where their tokens stand for the same characters."""

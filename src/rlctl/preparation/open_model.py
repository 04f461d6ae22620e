"""Find and open the models that a configuration names, and read their facts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.checkpoints.conversion.prepared_model import body_of, merged, planned_text_part, repositioned, text_part_of
from rlctl.checkpoints.hf.hf_files import read_config, refuse_quantized
from rlctl.checkpoints.hf.model_facts import facts_in, known_facts
from rlctl.checkpoints.hf.safetensors_files import refuse_others_for_vllm
from rlctl.checkpoints.megatron.lora_weights import adapter_keys
from rlctl.checkpoints.megatron.megatron_directory import find, is_of_run, manifest_of
from rlctl.checkpoints.model_files import ModelFiles, Tell, resolve_model
from rlctl.config.files import user_path
from rlctl.config.user_code import MODEL
from rlctl.errors import InputError, listed
from rlctl.models.catalog import lookup_entry, near
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file
from rlctl.models.hf_config import most_positions, rope_of
from rlctl.models.vision import VISION_FAMILIES, vision_family, why_untrained
from rlctl.preparation.laptop_model import supply
from rlctl.preparation.laptop_vision import supply_vision
from rlctl.rewards.reward_model_scorer import reward_model
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import ModelConfig
from rlctl.settings.other_models import ListedTeacher, TeacherConfig

WHOLE = "; no image tokens are counted. Data with images, or --set model.images=true, trains all of it"


def find_model(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    copies: bool = True,
    images: bool | None = None,
    trust_remote_code: bool = False,
    tell: Tell = lambda _: None,
) -> ModelFiles:
    """Find or fetch a model with `resolve_model`. Make the model of the preset laptop-vision, and without access to the
    hub the model of the preset laptop.

    For a run with adapters, return the merged model. For a multimodal model, return its text part, unless `images`.
    Both are written to the cache only with `copies`.
    """
    model = supply_vision(name, tell) or resolve_model(
        name, revision, weights=weights, trust_remote_code=trust_remote_code, tell=tell, otherwise=supply
    )
    copies = weights and copies
    whole = merged(model, tell, copies=copies)
    return _seeing(whole) if images else text_part_of(whole, tell, copies=copies)


def find_base(name: str, checkpoint: Path, tell: Tell) -> ModelFiles:
    """Find or fetch the base model of a checkpoint's run: with weights only if the run trained adapters, and with its
    vision part only if the run trained on images."""
    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

    directory, images, adapted = find(checkpoint), None, False
    if directory is not None and is_of_run(directory):
        images = manifest_of(directory)["config"].get("model.images", {}).get("value")
        adapted = bool(adapter_keys(TorchDistReader.open(directory.shards).shapes))
    return find_model(name, weights=adapted, images=images, tell=tell)


def _seeing(files: ModelFiles) -> ModelFiles:
    """Return a vision-language model with a note that all of it is trained. Raises InputError for a model type that
    rlctl does not train on images."""
    config = read_config(files.directory)
    if vision_family(config) is None:
        raise _without_images(files.label, config)
    note = f"{files.label} reads images: all of it is trained, by the backend dtensor"
    if VISION_FAMILIES[config["model_type"]].mutual:
        note += ". On CPUs its tokens of an image attend to earlier ones alone, as in vLLM there"
    return files if files.note else replace(files, note=note)


def _without_images(label: str, config: dict[str, Any]) -> InputError:
    if reason := why_untrained(config):
        hint = "Name a model of another type, or train only on text: --set model.images=false."
        return InputError(f"{label} is not trained on images: {reason}.", hint)
    return InputError(
        f"{label} is not of a type whose images are trained on ({', '.join(VISION_FAMILIES)}).",
        "Name such a model, or train only on text: --set model.images=false.",
    )


@dataclass(frozen=True)
class NamedModel:
    """A model's files and facts."""

    files: ModelFiles
    facts: ModelFacts


def open_model(
    model: ModelConfig,
    tell: Tell = lambda _: None,
    *,
    weights: bool = True,
    copies: bool = True,
    engines_alone: bool = False,
) -> NamedModel:
    """Find or fetch the model. `weights`: not only its configuration and tokenizer; `copies`: write the text part of a
    multimodal model to the cache. Raises InputError for a missing model, an unknown family, or quantized weights;
    `engines_alone` allows the quantized weights that vLLM reads."""
    if not model.name:
        raise InputError("No model: --model is not given.", "Give --model, or start from --preset laptop.")
    files = find_model(
        model.name,
        model.revision,
        weights=weights,
        copies=copies,
        images=model.images,
        trust_remote_code=model.trust_remote_code,
        tell=tell,
    )
    if files.megatron is None and not engines_alone:
        refuse_quantized(files.directory)
    if files.megatron is None and engines_alone:
        refuse_others_for_vllm(files.directory)
    files = repositioned(files, model.max_position_embeddings, model.rope_scaling)
    facts = facts_in(files.directory)
    if most := _more_positions(facts, model):
        tell(f"{files.label} has {facts.max_length:,} positions, and is extended to {most:,} (model.extend_positions)")
        files = repositioned(files, most, {})
        facts = replace(facts, max_length=most)
    return NamedModel(files, facts)


def published_facts(
    model: ModelConfig, tell: Tell = lambda _: None, *, engines_alone: bool = False, planned: bool = False
) -> ModelFacts:
    """Return the facts of a model without its weights: from a local directory's configuration, the catalog, or the
    hub's configuration, in this order. `planned` allows quantized weights that rlctl plans and cannot train.

    Raises InputError with similar catalog names for an unknown model, and for models that `open_model` refuses.
    """
    if not model.name:
        raise InputError("No model: --model is not given.", "Give --model, or a preset that names one.")
    here, entry = user_path(model.name).is_dir(), lookup_entry(model.name)
    if not here and entry is not None and (facts := known_facts(model.name, images=bool(model.images))) is not None:
        if entry.text_part and facts.vision is None:
            note = planned_text_part(model.name, facts, "bfloat16")
            tell(note + (WHOLE if vision_family(entry.config) else ""))
        return _repositioned(facts, model)
    if not here and entry is not None and entry.text_part and model.images:
        raise _without_images(model.name, entry.config)
    try:
        files = find_model(model.name, model.revision, weights=False, images=model.images, tell=tell)
    except InputError as error:
        close = near(model.name)
        raise InputError(
            error.message, f"Known without a download: {', '.join(close)}." if close else error.hint
        ) from error
    if files.megatron is None and not engines_alone:
        refuse_quantized(files.directory, planned=planned)
    if files.note:
        tell(files.note)
    return _repositioned(facts_in(files.directory), model)


def _repositioned(facts: ModelFacts, model: ModelConfig) -> ModelFacts:
    most = most_positions(model.max_position_embeddings, model.rope_scaling)
    most = most or facts.max_length
    rope = rope_of(model.rope_scaling, facts.rope.theta, most) if model.rope_scaling else facts.rope
    repositioned = replace(facts, max_length=most, rope=replace(rope, interleaved=facts.rope.interleaved))
    return replace(repositioned, max_length=_more_positions(repositioned, model) or repositioned.max_length)


def _more_positions(facts: ModelFacts, model: ModelConfig) -> int | None:
    positions = model.max_length if model.extend_positions and has_file(facts.family) else None
    return positions if positions and positions > facts.max_length else None


def published_teachers(config: RlctlConfig, tell: Tell = lambda _: None) -> tuple[ModelFacts, ...]:
    """Return the `published_facts` of each teacher that the run computes, or of the reward model."""
    names = [name.removeprefix(MODEL) for name in config.reward_models]
    if len(names) == 1 and not config.named_teacher and (facts := known_facts(names[0])) is not None:
        return (facts,)
    if (scorer := open_scorer(config, weights=False)) is not None:
        return (scorer.facts,)
    teacher = config.named_teacher
    if teacher is None:
        return ()

    def facts_of(named: TeacherConfig | ListedTeacher) -> ModelFacts:
        return published_facts(ModelConfig(name=named.model, revision=named.revision, images=config.model.images), tell)

    first = facts_of(teacher)
    others = {number: facts_of(other) for number, other in [*config.listed_teachers.items()][1:]}
    for number, facts in others.items():
        _require_alike_rows(first, facts, f"teacher.models[{number}].model", str(config.listed_teachers[number].model))
    return (first, *others.values())


def open_teacher(
    config: RlctlConfig, tell: Tell = lambda _: None, *, weights: bool = True, copies: bool = True
) -> NamedModel | None:
    """Find or fetch the teacher or the reward model with `open_model`; None: the run has neither. Raises InputError if
    the teacher's context is shorter than `model.max_length`."""
    if (teacher := config.named_teacher) is None:
        return open_scorer(config, weights=weights)
    key = next((f"teacher.models[{number}].model" for number in config.listed_teachers), "teacher.model")
    return _open_teacher(config, teacher, key, tell, weights=weights, copies=copies)


def open_further_teachers(
    config: RlctlConfig, first: NamedModel | None, tell: Tell = lambda _: None, *, weights: bool = True,
    copies: bool = True,
) -> tuple[NamedModel, ...]:  # fmt: skip
    """Find or fetch the teachers behind the first of several. Raises InputError for one with other rows."""
    models = []
    for number, teacher in [*config.listed_teachers.items()][1:]:
        key = f"teacher.models[{number}].model"
        model = _open_teacher(config, teacher, key, tell, weights=weights, copies=copies)
        assert first is not None  # `open_teacher` has opened the first of them
        _require_alike_rows(first.facts, model.facts, key, str(teacher.model))
        models.append(model)
    return tuple(models)


def _require_alike_rows(first: ModelFacts, other: ModelFacts, key: str, name: str) -> None:
    if first.unpacked != other.unpacked:
        theirs, firsts = ("cannot", "can") if other.unpacked else ("can", "cannot")
        raise InputError(
            f"{key}: rows of {name} {theirs} be packed, and these of the first of teacher.models {firsts}.",
            "Name teachers that read alike rows.",
        )


def _open_teacher(
    config: RlctlConfig, teacher: TeacherConfig | ListedTeacher, key: str, tell: Tell, *, weights: bool, copies: bool
) -> NamedModel:
    teacher_model = ModelConfig(
        name=teacher.model,
        revision=teacher.revision,
        images=config.model.images,
        trust_remote_code=config.model.trust_remote_code,
    )
    try:
        model = open_model(teacher_model, tell, weights=weights, copies=copies)
    except InputError as error:
        raise InputError(f"{key}: {error.message}", error.hint) from error
    if (length := config.model.max_length) and length > model.facts.max_length:
        raise InputError(
            f"--max-length {length} is more than the {model.facts.max_length} tokens that the teacher "
            f"{teacher.model} takes.",
            "Lower it.",
        )
    return model


def open_scorer(config: RlctlConfig, *, weights: bool = True) -> NamedModel | None:
    """Find or fetch the reward model; None: the run has none. Raises InputError for a second model beside the policy,
    and for a reward model that no policy backend loads."""
    names = [*config.reward_models]
    if not names:
        return None
    if config.model.images:
        raise InputError(
            f"Reward {names[0]!r}: a reward model reads only text, and the rollouts have images.",
            "Score them with a function (--reward path/to/file.py:function), which is given the images.",
        )
    teacher = config.named_teacher
    served = [f"a teacher at {entry.endpoint}" for entry in config.served_teachers.values()]
    if len(names) > 1 or teacher or served:
        others = [*names[1:], *([f"the teacher {teacher.model}"] if teacher else []), *served]
        raise InputError(
            f"The run has the reward model {names[0]!r} and {listed(others)}; beside the policy it computes one model.",
            "Name one of them.",
        )
    try:
        files = body_of(reward_model(names[0]), weights=weights)
        return NamedModel(files, facts_in(files.directory))
    except InputError as error:
        if names[0] in error.message:
            raise
        raise InputError(f"Reward {names[0]!r}: {error.message}", error.hint) from error

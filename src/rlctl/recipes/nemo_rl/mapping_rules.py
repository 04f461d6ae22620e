"""Rules for the keys of a NeMo-RL recipe. A rule sees the whole recipe, so keys can depend on each other (Megatron wins
over DTensor if both are on)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlctl.config.files import read_text
from rlctl.config.passthrough import installed_field
from rlctl.config.recipes import Import, short
from rlctl.recipes.rules import Found, Rule, differs, hand_on, logs, only, to, when

MEGATRON, DTENSOR, VLLM = "policy.megatron_cfg", "policy.dtensor_cfg", "policy.generation.vllm_cfg"
DDP = f"{MEGATRON}.distributed_data_parallel_config"
HANDED_ON = {
    f"{MEGATRON}.optimizer": "optimizer",
    f"{MEGATRON}.fp8_cfg": "megatron",
    f"{MEGATRON}.model_overrides": "megatron",
    DDP: "ddp",
    MEGATRON: "megatron",
    "policy.generation.vllm_kwargs": "vllm",
    VLLM: "vllm",
}
"""Sections whose keys are fields of Megatron-Core or vLLM, and the sections of rlctl that hand such fields on."""
DATASETS = {
    "OpenMathInstruct-2": ("nvidia/OpenMathInstruct-2", "problem", "expected_answer", "train_1M"),
    "gsm8k": ("openai/gsm8k:main", "question", "answer", None),
    "DeepScaler": ("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer", None),
    "DAPOMath17K": ("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth", None),
    "AIME2024": ("HuggingFaceH4/aime_2024", "problem", "answer", "train"),
}
"""NeMo-RL's names of data sets: the hub's name, the fields of prompt and answer, and the split that is its default."""

TEXT_DATASETS = {
    **dict.fromkeys(("OpenMathInstruct-2", "openmathinstruct2"), DATASETS["OpenMathInstruct-2"]),
    "gsm8k": DATASETS["gsm8k"],
    "tulu3_sft_mixture": ("allenai/tulu-3-sft-mixture", None, None, None),
    "squad": ("rajpurkar/squad", None, None, None),
    "Nemotron-Cascade-2-SFT-Math": ("nvidia/Nemotron-Cascade-2-SFT-Data:math", None, None, None),
}
PAIR_DATASETS = {
    "HelpSteer3": ("nvidia/HelpSteer3:preference", "context", None, None),
    "Tulu3Preference": ("allenai/llama-3.1-tulu-3-8b-preference-mixture", None, None, None),
}
"""Data sets of SFT and DPO, as in `DATASETS`; None: the rows have the fields that rlctl looks for."""
CLEVR, MMPR, REFCOCO = ("clevr-cogent", "clevr_cogent"), "mmpr-tiny", "refcoco"
"""NeMo-RL's data sets with images whose names on the hub depend on the split, or whose images are files apart. SFT had
another name of the first up to version 0.5."""
CLEVR_PARTS = {
    **dict.fromkeys(("train", "trainA"), "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex"),
    "valA": "MMInstruction/Clevr_CoGenT_ValA",
    "valB": "MMInstruction/Clevr_CoGenT_ValB",
}
"""Names on the hub of the splits of CLEVR-CoGenT, each of which has one split, `train`."""
IMAGE_DATASETS = {
    "geometry3k": ("hiyouga/geometry3k", "problem", "answer", None),
    REFCOCO: ("jxu124/refcoco", None, None, None),
}
"""Data sets with images of all algorithms, as in `DATASETS`, next to those above."""
ALL_IMAGE_DATA = (*CLEVR, *IMAGE_DATASETS, MMPR)
OTHER_DATA = {
    "avqa": "sound", "audiomcq": "sound", "mmau": "sound", "daily-omni": "video", "intent-train": "video",
    "intent-bench": "video",
}  # fmt: skip
"""NeMo-RL's data sets of sound or video."""
IN_ANSWER_TAGS = "<answer>(.*?)</answer>"
END_OF_TEXT = "{% if messages[-1]['role'] == 'assistant' %}{{ eos_token }}{% endif %}"

JOINED_MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template of a recipe without one: joined message contents."""

NO_CAP = 1e9
"""Beyond every importance weight, since log-ratios end at 20."""

ADAPTED = {"linear_qkv": "attention", "linear_proj": "attention", "linear_fc1": "mlp", "linear_fc2": "mlp"}
"""Layers that Megatron-Bridge's adapters are named after, and the group of `training.lora.targets` they are in."""


def without(reason: str) -> Rule:
    """Return the rule of a key without counterpart. Overridden Megatron-Core fields are still passed on, and checked
    there."""

    def rule(found: Found) -> None:
        changed = found.name in found.result.overridden and found.value != found.result.before.get(found.name)
        if changed and found.name.startswith(MEGATRON) and is_field(found.name):
            passes()(found)
        else:
            found.skip(reason)

    return rule


SWITCHES = {
    "teacher.megatron_cfg": ("teacher.megatron_cfg.enabled", "the teacher is computed by the other backend"),
    f"{MEGATRON}.peft": (f"{MEGATRON}.peft.enabled", "LoRA is off"),
    f"{MEGATRON}.fp8_cfg": (f"{MEGATRON}.fp8_cfg.enabled", "float8 training is off"),
    f"{DTENSOR}.lora_cfg": (f"{DTENSOR}.lora_cfg.enabled", "LoRA is off"),
    "grpo.async_grpo": ("grpo.async_grpo.enabled", "grpo.async_grpo is off"),
    "distillation": ("teacher.model_name", "the recipe has no teacher"),
    "teacher": ("teacher.model_name", "the recipe has no teacher"),
}
"""Sections that are not read where a key is off, and the reason."""
OF_THE_ALGORITHM = ("grpo", "distillation", "async_rl", "loss_fn", "data", "env", "teacher", "teachers", "value")
"""Sections whose keys depend on the algorithm."""
FOREIGN = "it belongs to what rlctl does not run yet"


def not_read(key: str, leaves: Mapping[str, Any], foreign: str | None) -> str | None:
    """Return why a recipe's key has no effect: its section is off, or is of what rlctl does not run; None: it has."""
    other = ("policy.train_global_batch_size", "policy.reward_model_cfg.")
    if foreign and (key.partition(".")[0] in OF_THE_ALGORITHM or key.startswith(other)):
        return FOREIGN
    if key.startswith(f"{MEGATRON}.") and not megatron_on(leaves) and not of_other_backend(key, leaves):
        return "policy.megatron_cfg is off"
    if key.startswith((f"{DTENSOR}.", "policy.scheduler.")) and megatron_on(leaves):
        return "Megatron trains: it wins when both are on"
    if key.startswith("teacher.dtensor_cfg.") and leaves.get("teacher.megatron_cfg.enabled"):
        return "the teacher is computed by the other backend"
    if key.startswith(("data.", "env.math.")) and environment_used(leaves) == PUZZLE:
        return "the sliding puzzle makes its own prompts and rewards"
    for section, (switch, reason) in SWITCHES.items():
        if key.startswith(f"{section}.") and key != switch and not leaves.get(switch):
            return reason
    return None


ALGORITHMS = {
    "sft": "supervised fine-tuning (SFT)",
    "dpo": "direct preference optimization (DPO)",
    "rm": "the training of reward models (RM)",
    "distillation": "distillation from several teachers at once",
}
"""Sections of NeMo-RL's other algorithms; rlctl runs those in `OF_TEXTS`."""
ONE_TEACHER = "teachers.0"
"""The only entry of off-policy distillation's list of teachers, with its tokenizer."""
OF_TEXTS = ("sft", "dpo", "rm")
OF_PAIRS = ("dpo", "rm")
TASKS = {
    "aime2024": "aime24",
    "aime2025": "aime25",
    "gpqa_diamond": "gpqa-diamond",
    "math500": "math-500",
    "mmlu_pro": "mmlu-pro",
}
"""Tasks of `rlctl eval`, by NeMo-RL's names of the same data."""
MULTI_REWARD = "math_multi_reward"
"""The environment whose rewards GDPO compares one by one."""
GYM, GYM_DATA = "nemo_gym", "NemoGymDataset"
"""The environment of NeMo Gym, and the data set of its rows."""
TEXT_DATA = frozenset({*DATASETS, "ResponseDataset", GYM_DATA})
PLACES = ("data.train", "data.default", "data", "data.validation")
"""Sections that name data sets."""
OTHER_INPUTS = re.compile(r"(^|[-_/.])(a?vlm?|omni|vision|audio|video)([-_.]|$)", re.IGNORECASE)


def data_names(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a recipe's data sets, those of a list too, by their keys."""
    found = {f"{place}.dataset_name": leaves.get(f"{place}.dataset_name") for place in PLACES}
    for place in PLACES:
        listed = leaves.get(place)
        for index, each in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(each, Mapping):
                found[f"{place}.{index}.dataset_name"] = each.get("dataset_name")
    return {key: name for key, name in found.items() if name is not None}


def of_images(leaves: Mapping[str, Any]) -> bool:
    """Return whether a recipe trains on images, sound or video."""
    handling, train = ("processor", "env_name"), leaves.get("data.train")
    names = [leaves.get(f"{place}.{name}") for place in ("data", "data.default", "data.train") for name in handling]
    listed = train if isinstance(train, list) else ()
    names += [each.get(name) for each in listed if isinstance(each, Mapping) for name in handling]
    if not any(str(leaves.get(f"{place}.dataset_name")) in TEXT_DATA for place in ("data", "data.train")):
        names.append(leaves.get("policy.model_name"))  # no word of its data says that they are texts
    of_data = any(name in (*ALL_IMAGE_DATA, *OTHER_DATA) for name in data_names(leaves).values())
    return of_data or leaves.get("policy.is_vlm") is True or any(OTHER_INPUTS.search(str(name)) for name in names)


MEDIA_LIMITS = re.compile(r"\.limit_mm_per_prompt\.(audio|video)\b")
MEDIA_SECTIONS = re.compile(r"(policy\.tokenizer|policy\.generation\.vllm_cfg)\.(audio|video)\.|data\.default\.video_")
HEARING = re.compile(r"(^|[-_/.])(omni|audio|video)([-_.]|$)", re.IGNORECASE)


def sound_or_video(leaves: Mapping[str, Any]) -> str | None:
    """Return the sentence on a recipe of sound or video, which names the key that says so; None: it has images."""
    key, kind = next(((key, OTHER_DATA[name]) for key, name in data_names(leaves).items() if name in OTHER_DATA),
                     (None, ""))  # fmt: skip
    if key is None:
        limit = next((key for key, value in leaves.items() if value and MEDIA_LIMITS.search(key)), None)
        section = next((key for key, value in leaves.items() if value and MEDIA_SECTIONS.match(key)), None)
        key = limit or section
        kind = "video" if key and "video" in key else "sound"
    hears = HEARING.search(str(leaves.get("policy.model_name")))
    if (
        key is None
        and hears
        and not leaves.get("policy.is_vlm")
        and not data_names(leaves).keys() & _with_images(leaves)
    ):
        key, kind = "policy.model_name", "sound or video"
    if key is None:
        return None
    value = data_names(leaves).get(key, leaves.get(key))
    return f"This recipe trains on {kind} ({key} = {short(value)}), and rlctl trains on texts and images."


def _with_images(leaves: Mapping[str, Any]) -> set[str]:
    return {key for key, name in data_names(leaves).items() if name in ALL_IMAGE_DATA}


def foreign_kind(leaves: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return why rlctl cannot run this kind of recipe, and its algorithm."""
    sections = {key.partition(".")[0] for key in leaves}
    algorithm = next((name for name in ALGORITHMS if name in sections), None)
    if of_images(leaves) and "eval" not in sections and (line := sound_or_video(leaves)):
        return line, algorithm
    if "eval" in sections:
        task = TASKS.get(str(leaves.get("data.dataset_name")).lower(), "TASK")
        command = f"rlctl eval --model {leaves.get('generation.model_name', 'NAME')} --task {task}"
        samples = leaves.get("eval.num_tests_per_prompt")
        command += f" -n {samples}" if samples not in (None, 1) else ""
        return f"This recipe evaluates a model, and rlctl reads no such recipe: `{command}` measures one.", None
    if algorithm == "distillation" and leaves.get("teacher.model_name") and not leaves.get("teachers"):
        return None, algorithm
    if algorithm == "distillation" and leaves.get(f"{ONE_TEACHER}.model_name"):
        return None, "distill"
    if algorithm in OF_TEXTS:
        return None, algorithm
    if algorithm is not None:
        return f"This recipe is of {ALGORITHMS[algorithm]}, which rlctl does not run yet.", algorithm
    if leaves.get("on_policy_distillation.enabled") is True:
        return "This recipe distills from teachers by agent, and rlctl has one teacher for all prompts.", "distillation"
    return None, "grpo" if "grpo" in sections else None


STEPS = ("grpo.", "distillation.", "sft.", "dpo.", "rm.")
"""The sections of the algorithms that rlctl runs."""


def of_texts(result: Import) -> bool:
    return result.values.get("run.algorithm") in (*OF_TEXTS, "distill")


def across_tokenizers(rule: Rule, otherwise: str | Rule = "the teacher has the policy's tokenizer") -> Rule:
    """Return the rule of a key for off-policy distillation, whose teacher has another tokenizer."""
    return when(lambda found: found.result.values.get("run.algorithm") == "distill", rule, otherwise)


def loss_scaling(found: Found) -> None:
    """Map whether the divergence is scaled to the cross entropy, which has the weight 1 then."""
    if found.value:
        found.map_all({"distillation.balanced": True, "distillation.sft_weight": 1.0})
    else:
        why = "the divergence of chunks is averaged over all tokens of a batch, and not over its chunks"
        found.set("distillation.weight", found.get("loss_fn.kl_loss_weight") or 1.0)
        found.set("distillation.sft_weight", found.get("loss_fn.ce_loss_scale") or 0.0)
        found.say("changed", why)


def data_files(found: Found) -> tuple[str, None, None, None] | None:
    """Return the name of plain texts: a file of rows, or the part of a data set of the hub that files are of."""
    path, subset = str(found.get("data_files", *DATA)), found.get("subset", *DATA)
    if files := re.fullmatch(r"hf://datasets/([^/]+/[^/]+)/([^/*]+)/[^/]*", path):
        return f"{files[1]}:{files[2]}", None, None, None
    if path.endswith((".jsonl", ".json", ".csv", ".parquet")) and "*" not in path and "://" not in path:
        return path, None, None, None
    return None if re.search(r"[*]|://|\.\w+$", path) else (f"{path}:{subset}" if subset else path, None, None, None)


def average_of_texts(found: Found) -> None:
    """The supervised part of a DPO loss is averaged over tokens where the preferences are."""
    same = bool(found.value) == bool(found.get("dpo.preference_average_log_probs"))
    if same or not found.get("dpo.sft_loss_weight"):
        found.skip("read with dpo.preference_average_log_probs")
    else:
        found.say("not yet", "it is averaged where dpo.preference_average_log_probs is on", "preference.average")


OF_LATER = "loss_fn.positive_example_nll_weight"
"""A key that all of NeMo-RL's recipes of rollouts have since version 0.7."""
OF_GROUPS = {"num_prompts_per_step": 32, "num_generations_per_prompt": 16, "max_num_steps": -1, "max_num_epochs": 1}
OF_LOSS = {
    "loss_fn.reference_policy_kl_penalty": 0.01, "loss_fn.use_on_policy_kl_approximation": None,
    "loss_fn.use_importance_sampling_correction": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {f"grpo.{key}": value for key, value in OF_GROUPS.items()} | OF_LOSS
    | {"grpo.adv_estimator.use_leave_one_out_baseline": True},
    "ppo": {f"grpo.{key}": value for key, value in OF_GROUPS.items()} | OF_LOSS
    | {"grpo.ppo_epochs": 4, "value_loss_fn.cliprange": None},
    "distillation": {
        "distillation.num_prompts_per_step": 128, "distillation.num_generations_per_prompt": 1,
        "distillation.max_num_steps": 1000, "loss_fn.kl_type": "mixed",
    },
    "sft": {"sft.max_num_steps": 60},
    "dpo": {"dpo.max_num_steps": 150, "dpo.reference_policy_kl_penalty": 0.05},
    "rm": {"rm.max_num_steps": -1, "rm.max_num_epochs": 1},
}  # fmt: skip
"""NeMo-RL's defaults by algorithm that differ from rlctl's, since version 0.7; earlier recipes had to set these
keys."""


def left_out(algorithm: str | None, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that NeMo-RL has for keys that are not in a recipe."""
    values = dict(DEFAULTS.get(algorithm or "", {}))
    if algorithm in ("grpo", "ppo"):
        # Recipes of before version 0.5 have no estimator, and a penalty without a limit.
        if "loss_fn.reference_policy_kl_type" in leaves or "loss_fn.use_on_policy_kl_approximation" not in leaves:
            values["loss_fn.kl_output_clamp_value"] = 10.0
        if "grpo.use_leave_one_out_baseline" in leaves:
            values.pop("grpo.adv_estimator.use_leave_one_out_baseline", None)
        # Up to version 0.3 prompts came as written, but for those of a data set that was split at random.
        if leaves.get("data.dataset_name") != "OpenMathInstruct-2":
            values["data.shuffle"] = False
    if any(key.startswith(f"{MEGATRON}.scheduler.") for key in leaves):
        values[f"{MEGATRON}.scheduler.lr_decay_style"] = "linear"
    if leaves.get(f"{MEGATRON}.scheduler.lr_decay_style") == "WSD":
        values[f"{MEGATRON}.scheduler.lr_wsd_decay_style"] = "exponential"
    return {key: value for key, value in values.items() if key not in leaves}


def step_rollouts(found: Found) -> int:
    return (found.get("num_prompts_per_step", *STEPS) or 1) * (found.get("num_generations_per_prompt", *STEPS) or 1)


def kl_type(found: Found) -> None:
    """Map the direction of the divergence over the teacher's most likely tokens."""
    shares = {"forward": 1.0, "reverse": 0.0, "mixed": found.leaves.get("loss_fn.mixed_kl_weight", 0.5)}
    if (share := shares.get(found.value)) is None:
        known = "rlctl knows forward, reverse, and mixed with its mixed_kl_weight"
        found.say("not yet", known, "distillation.forward_share")
    else:
        found.map_all({"distillation.loss": "top-k", "distillation.forward_share": share})


def kl_weight(found: Found) -> None:
    """Map the weight of each token's KL penalty. NeMo-RL has one in each case since version 0.7."""
    if found.value:
        found.map("loss.kl_weight", "importance")
    elif found.value is None or OF_LATER in found.leaves:
        found.map("loss.kl_weight", "policy")
    else:
        found.skip("what rlctl does")


def sequence_ratios(found: Found) -> None:
    """Map ratios of sequences; NeMo-RL then also corrects for the engine by the product over a sequence."""
    if found.get("loss_fn.use_importance_sampling_correction"):
        found.set("loss.importance_level", "sequence")
    found.map("run.algorithm", "gspo")


def estimator(found: Found) -> None:
    """Map the form of advantages."""
    weights = found.get("grpo.adv_estimator.reward_weights")
    if found.value in (None, "grpo"):
        found.skip("what rlctl does")
    elif found.value == "gae" and found.result.values.get("run.algorithm") == "ppo":
        found.skip("what --algorithm ppo does")
    elif found.value == "reinforce_plus_plus":
        minus = found.get("grpo.adv_estimator.minus_baseline") is not False
        found.map("run.algorithm", "reinforce++-baseline" if minus else "reinforce++")
    elif found.value == "gdpo" and environment_used(found.leaves) == GYM and weights:
        found.say("not yet", "the parts of NeMo Gym's rewards have the weight 1", "advantage.per_term")
    elif found.value == "gdpo" and environment_used(found.leaves) in (MULTI_REWARD, GYM):
        found.map_all({"advantage.per_term": True, "advantage.whiten": True, "advantage.whiten_over": "rollouts"})
    elif found.value == "gdpo":
        why = f"it compares the terms of a reward, which {MULTI_REWARD} and NeMo Gym have"
        found.say("not yet", why, "reward.terms")
    else:
        found.say("not yet", f"{found.value} is not imported; rlctl has --algorithm and advantage.*", "run.algorithm")


def gae_lambda(found: Found) -> None:
    """Map lambda. NeMo-RL may use another one for returns than for advantages, or one that depends on rollout
    length."""
    own = [found.get(f"grpo.adv_estimator.{name}") for name in ("gae_lambda_value", "gae_lambda_policy")]
    value, policy = (found.value if one is None else one for one in own)
    if value != policy or found.get("grpo.adv_estimator.length_adaptive_alpha"):
        found.say("not yet", "the critic and the policy have one lambda (critic.gae_lambda)", "critic.gae_lambda")
    else:
        found.map("critic.gae_lambda", policy)


def value_clip(found: Found) -> None:
    """Map the largest movement of a value; none where NeMo-RL has no number."""
    found.set("critic.value_clip", found.value or None)
    found.say("mapped", f"critic.value_clip: {found.value or 'none'}")


def kl_in_reward(found: Found) -> None:
    """Map the place of the KL penalty: PPO's may be in the reward of each token."""
    if found.result.values.get("run.algorithm") == "ppo":
        found.map("loss.kl_in", "reward" if found.value else "loss")
    elif found.value:
        found.say("not yet", "it is not imported yet; rlctl has loss.kl_in=reward", "loss.kl_in")
    else:
        found.skip("what rlctl does")


DEEPSEEK_COPIES, DEEPSEEK = ("docs/guides/deepseek.md", "/path/to/dsv3-bf16-checkpoint"), "deepseek-ai/DeepSeek-V3"
"""Names that NeMo-RL's recipes of DeepSeek-V3 have in place of a model, and the model that they mean."""


def model_name(found: Found) -> None:
    """Map the model. For an unmade bfloat16 copy of DeepSeek-V3, use the published float8 model."""
    if any(one in str(found.value) for one in DEEPSEEK_COPIES):
        found.map_all({"model.name": DEEPSEEK}, "its published float8 weights are read, and no copy needs to be made")
    else:
        found.map("model.name", found.value)


def of_the_policy(found: Found) -> None:
    """The value model begins as the policy's model does."""
    if found.value in (None, found.get("policy.model_name")):
        found.skip("the critic is of the policy's model")
    else:
        found.say("not yet", "the critic is of the policy's model (model.name)", "model.name")


LEARNED = re.compile(r"optimizer\.(lr|weight_decay|clip_grad)|scheduler\..*")
"""Learning keys that a critic has too."""


def critic_values(own: Import) -> dict[str, Any]:
    """Return the keys of the critic, of an import in which the value model played the policy."""
    named = {key: key.removeprefix("optimizer.") for key in own.values if LEARNED.fullmatch(key)}
    return {f"critic.{name}": own.values[key] for key, name in named.items()}


def in_epochs(result: Import, epochs: int) -> None:
    """NeMo-RL's schedules count each pass over a batch of PPO; rlctl's count the steps."""
    counted = ("warmup_steps", "decay_steps", "wsd_steps")
    keys = [f"{section}scheduler.{name}" for section in ("", "critic.") for name in counted]
    told = []
    for key in (key for key in keys if result.values.get(key)):
        result.values[key] = -(-result.values[key] // epochs)
        told.append(f"{key} is {result.values[key]}")
    if told:
        result.notes.append(f"NeMo-RL's schedules count all {epochs} passes over a batch, and rlctl's its steps: "
                            f"{', '.join(told)}")  # fmt: skip


def of_groups(rule: Rule) -> Rule:
    """Return the rule of a key of advantages within groups, which other estimators than these do not read."""
    read = (None, "grpo", "gdpo")
    return when(lambda found: found.get("grpo.adv_estimator.name") in read, rule, "grpo.adv_estimator does not use it")


def baseline(found: Found) -> None:
    """Map the baseline of a group, of whose rollouts NeMo-RL takes the standard deviation as well."""
    to("advantage.baseline", {True: "leave-one-out", False: "mean"})(found)
    if isinstance(found.value, bool):
        found.set("advantage.std_of", "others" if found.value else "group")


TERMS = {"correctness": "tagged-answer", "format": "tagged-format", "integer": "tagged-integer"}
"""The rewards of NeMo-RL's environment with several of them, in its order, and rlctl's."""


def multi_reward(found: Found) -> None:
    """Map the environment with several rewards, and the weights of these."""
    weights = found.get("grpo.adv_estimator.reward_weights") or [1.0] * len(TERMS)
    if environment_used(found.leaves) != MULTI_REWARD:
        environment(found)
    elif found.name.endswith(".math_verify_impl") and found.value not in (None, "hf_math_verify"):
        found.say("not yet", "NeMo-RL knows hf_math_verify here", "reward.terms")
    elif len(weights) != len(TERMS):
        found.say("not yet", f"reward_weights has a weight for each of {', '.join(TERMS)}", "reward.terms")
    else:
        terms = [{"name": name, "weight": weight} for name, weight in zip(TERMS.values(), weights, strict=True)]
        found.map_all({"reward.terms": terms, "reward.extract": "answer-tag"})


def reward_scaling(found: Found) -> None:
    """Map scaling of 0/1 rewards: shift + weight r. NeMo-RL first clamps them to the source range."""
    ends = {"source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1.0}
    given = {name: found.get(f"grpo.reward_scaling.{name}") for name in ends}
    at = ends | {name: value for name, value in given.items() if value is not None}
    low, width = at["source_min"], at["source_max"] - at["source_min"]
    if width <= 0:
        found.say("not yet", "source_max has to be above source_min", "reward.terms")
        return
    wrong, right = (
        at["target_min"] + (min(max(reward, low), low + width) - low) / width * (at["target_max"] - at["target_min"])
        for reward in (0.0, 1.0)
    )
    if environment_used(found.leaves) != "math" or right <= wrong:
        found.say("not yet", "--reward NAME=WEIGHT scales rlctl's own rewards", "reward.terms")
        return
    if right - wrong != 1:
        found.set("reward.terms", [{"name": math_scorer(found.leaves), "weight": right - wrong}])
    if wrong:
        found.set("reward.shift", wrong)
    found.say("mapped", f"the reward has the weight {right - wrong:g} (reward.terms) and the shift {wrong:g} "
                        "(reward.shift); reward_mean is without the shift")  # fmt: skip


def reward_shaping(found: Found) -> None:
    """Map DAPO's penalty with the same start and slope. NeMo-RL: min(0, -(tokens - start) / buffer x penalty) with
    start = max_response_length - buffer; rlctl's buffer ends at generation.max_new_tokens."""
    section = "grpo.reward_shaping"
    buffer, longest = found.get(f"{section}.overlong_buffer_length"), found.get(f"{section}.max_response_length")
    if (factor := found.get(f"{section}.stop_properly_penalty_coef")) is not None:
        found.map("reward.truncated_factor", factor)
    elif not buffer or not longest:
        found.say("not yet", "it needs overlong_buffer_length and max_response_length", "reward.overlong_buffer")
    else:
        start, limit = longest - buffer, completion_limit(found) or 0
        penalty = found.leaves.get(f"{section}.overlong_buffer_penalty", 1) * (limit - start) / buffer
        if 0 < start < limit:
            found.set("reward.overlong_buffer", (limit - start) / limit)
            found.set("reward.overlong_factor", penalty)
        found.say("mapped", "reward.overlong_buffer and reward.overlong_factor, for generation.max_new_tokens")


def completion_limit(found: Found) -> Any:
    """Return the most tokens of a completion: a prompt needs at least one of all tokens of a rollout."""
    length, new = found.get("policy.max_total_sequence_length"), found.get("policy.generation.max_new_tokens")
    return min(length - 1, new) if isinstance(length, int) and isinstance(new, int) and length > 1 else new


def completion_length(found: Found) -> None:
    """Map the completion length within the total length."""
    limit = completion_limit(found)
    if limit == found.value:
        found.map("generation.max_new_tokens", limit)
    else:
        found.set("generation.max_new_tokens", limit)
        end = f"a rollout ends at {limit + 1} tokens, its prompt among them"
        found.say("mapped", f"generation.max_new_tokens: {limit}; {end}")


def megatron_on(leaves: Mapping[str, Any]) -> bool:
    return leaves.get(f"{MEGATRON}.enabled") is True


LEARNING = {
    True: re.compile(
        r"policy\.megatron_cfg\.(optimizer\.(optimizer|lr|min_lr|weight_decay|adam_\w+|clip_grad)|scheduler\.(lr_\w+"
        r"|(start|end)_weight_decay|weight_decay_incr_style))"
    ),
    False: re.compile(r"policy\.(optimizer\.(name|kwargs\.(lr|weight_decay|betas|eps))|scheduler|max_grad_norm)"),
}
"""Keys of optimizer and schedule, in Megatron's block and in DTensor's: they hold for either where it has none."""


def of_other_backend(key: str, leaves: Mapping[str, Any]) -> bool:
    """Return whether a key of the optimizer or the schedule is in the block of the backend that does not train."""
    return LEARNING[not megatron_on(leaves)].fullmatch(key) is not None


def carry_over(result: Import, other: Import, leaves: Mapping[str, Any]) -> None:
    """Complete the training backend's block from the other one (`other`), and note contradictions."""

    def subject(key: str) -> str:
        if "weight_decay" in key:
            return "weight decay"
        return "schedule" if key.startswith("scheduler.") else key

    own = {subject(key) for key in result.values if key != "scheduler.min_lr"}
    # An optimizer of torch without a scheduler has a constant learning rate.
    if not megatron_on(leaves) and any(leaves.get(f"policy.optimizer.{name}") for name in ("name", "kwargs.lr")):
        own.add("schedule")
    taken = [key for key in other.values if subject(key) not in own and key not in result.values]
    for key in taken:
        result.set(key, other.values[key], other.source[key])
    sources = {other.source[key] for key in taken}
    for entry in other.entries:
        if entry.key not in sources and (entry.status == "mapped" or "optimizer.lr" in own):
            entry = dataclasses.replace(entry, status="not applicable", note="the backend that trains has its own")
        result.entries.append(entry)


def disagreement(result: Import, other: Import, leaves: Mapping[str, Any]) -> str | None:
    """Return a line on contradictions between the two backends' blocks (`other`: the unused one)."""
    blocks = (MEGATRON, "policy") if megatron_on(leaves) else ("policy", MEGATRON)
    told = [
        f"{key} is {result.values[key]} ({result.source[key]}), not {value} ({other.source[key]})"
        for key, value in other.values.items()
        if not key.startswith("scheduler.") and result.values.get(key, value) != value
    ]
    schedules = [_schedule(found.values, result.values.get("run.steps")) for found in (result, other)]
    # Without a schedule of its own a block has a constant learning rate.
    if other.values.keys() & {"optimizer.lr", "scheduler.warmup_steps"} and schedules[0] != schedules[1]:
        told.append(f"the schedule is that of {blocks[0]}.scheduler, not of {blocks[1]}.scheduler")
    backend = "Megatron" if megatron_on(leaves) else "DTensor"
    return f"{backend} trains, and its own block of the recipe holds: {'; '.join(told)}" if told else None


def _schedule(values: Mapping[str, Any], steps: Any) -> tuple[Any, ...]:
    warmup, decay = values.get("scheduler.warmup_steps", 0), values.get("scheduler.decay", "constant")
    rises = values.get("scheduler.init_lr", 0) if warmup else None
    falls = (values.get("scheduler.decay_steps", steps), values.get("scheduler.min_lr", 0))
    return warmup, rises, decay, falls if decay != "constant" else None


def learning_rate(found: Found) -> tuple[str, Any]:
    """Return the learning rate that holds, from the block of either backend, and its key."""
    own, other = (f"{MEGATRON}.optimizer.lr", "policy.optimizer.kwargs.lr")[:: 1 if megatron_on(found.leaves) else -1]
    key = other if found.get(own) is None and found.get(other) is not None else own
    return key, found.get(key)


def states_on_host(found: Found) -> None:
    """Keep all optimizer states in host memory, where a recipe may name a fraction; none with a fraction of 0."""
    on = found.get(f"{MEGATRON}.optimizer.optimizer_offload_fraction") != 0
    to("training.optimizer_offload", {True: on, False: False})(found)


def dtensor_adapters(found: Found) -> None:
    """Map the rank of adapters on all layers but those that are excluded; targets are named as the model names them."""
    named, excluded = (found.get(f"{DTENSOR}.lora_cfg.{key}") for key in ("target_modules", "exclude_modules"))
    if named or (found.get(f"{DTENSOR}.lora_cfg.match_all_linear") is False and not excluded):
        found.say("not yet", "adapters are on all layers of attention and MLP, or of one of them", "training.lora.rank")
    else:
        found.map("training.lora.rank", found.value)


def sharded_states_on_host(found: Found) -> None:
    """Keep the optimizer's states in host memory, where a recipe keeps the weights there too."""
    if found.value is True:
        but = "the optimizer's states alone are in host memory, no weights"
        found.map_all({"training.optimizer_offload": True}, but)
    else:
        to("training.optimizer_offload", {False: False})(found)


def engine(found: Found) -> None:
    names = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "megatron": "Megatron's own engine", "dynamo": "Dynamo"}
    if found.value in names:
        found.say("changed", f"the recipe generates with {names[found.value]}, and rlctl with vLLM")
    else:
        only("vllm", None, why="rlctl generates with vLLM", settled_by="generation.backend")(found)


def prediction_heads(found: Found) -> None:
    """Leave out multi-token-prediction training, which does not change the policy if its loss has no gradient in the
    layers below."""
    detached = found.get(f"{MEGATRON}.mtp_detach_heads") or found.get(f"{MEGATRON}.mtp_loss_scaling_factor") == 0
    why = "multi-token prediction is not trained"
    rule = differs(None, 0, why=f"{why}, of which the policy is independent") if detached else only(None, 0, why=why)
    rule(found)


def drafting(found: Found) -> None:
    """Map speculative decoding. A draft with weights is left out, or refused on the command line, because engines get
    only the policy's weights."""
    section = "policy.generation.vllm_kwargs.speculative_config"
    why = "the draft needs weights, and engines get those of the policy alone"
    if found.get(f"{section}.num_speculative_tokens") == 0:
        found.skip("0 speculative tokens turn speculative decoding off")
    elif found.get(f"{section}.method") in ("ngram", "ngram_gpu", "suffix"):
        passes()(found)
    elif found.name in found.result.overridden:
        found.say("not yet", f"{why}: methods without weights are ngram, ngram_gpu and suffix")
    else:
        found.say("changed", f"{why}; tokens are sampled without drafts, from the same distribution")


def engine_precision(found: Found) -> None:
    """Map float8 in the engines: weights in blocks of 128 x 128, or in MX blocks, quantized at each refit."""
    if found.value == "fp8":
        method = "mxfp8" if found.get(f"{VLLM}.is_mx") is True else "fp8_per_block"
        found.map("vllm.quantization", method)
    else:
        only(None, "bfloat16", "float32", "float16", why="engines hold the weights in model.dtype, or in fp8")(found)


def without_begin(found: Found) -> bool:
    """Return whether the recipe's chat template omits the tokenizer's first token."""
    template = str(found.get("policy.tokenizer.chat_template") or "")
    kept = found.result.values.get("model.images") is True  # the processor's template
    return "{" in template and "bos_token" not in template and not kept


def longest_text(found: Found) -> None:
    """Map maximum lengths. Texts may exceed the published length, which NeMo-RL never checks; engines refuse such
    rollouts there too."""
    if found.value and of_texts(found.result):
        found.map_all({"model.max_length": found.value, "model.extend_positions": True})
    else:
        found.map("model.max_length", found.value)


def rope_scaling(found: Found) -> None:
    """Map a key of the rotary embedding, by its name in a config.json."""
    found.map(f"model.rope_scaling.{found.name.rpartition('.')[2]}", found.value)


def template_variables(found: Found) -> None:
    found.map(f"model.chat_template_kwargs.{found.name.rpartition('.')[2]}", found.value)


MATH_SCORERS = {"hf_math_verify": "math-verify", "dapo_math_verify": "dapo-math"}
"""NeMo-RL's ways to compare answers, and rlctl's rewards."""


def math_scorer(leaves: Mapping[str, Any]) -> str:
    """Return the reward that compares answers as the recipe's environment `math` does."""
    return MATH_SCORERS.get(str(leaves.get("env.math.math_verify_impl")), "math-verify")


def steps_of_run(found: Found) -> None:
    if found.value == -1:
        found.skip("max_num_epochs says how long the run is")
    else:
        found.map("run.steps", found.value)


def epochs(found: Found) -> None:
    """Map the length of a recipe without a step count; with one, note that epochs may end it before `run.steps`."""
    steps = found.get("max_num_steps", *STEPS)
    if found.value is not None and isinstance(steps, int) and steps < 0:
        found.map("run.epochs", found.value)
        return
    # An epoch has at least one step.
    if found.value is None or (isinstance(steps, int) and 0 < steps <= found.value):
        found.skip("run.steps ends the run; prompts come round again")
        return
    prompts = found.get("num_prompts_per_step", *STEPS) or "batch.prompts"
    enough = f"{short(found.value)} x rows of the data / {short(prompts)} prompts of a step"
    found.say("changed", f"run.steps alone ends a run, and epochs do not: set it to {enough}, if that is less")


def recompute(found: Found) -> None:
    """Map whether activations are computed again: in whole layers, or in the parts that are named."""
    if found.value is not True and granularity_holds(found):
        found.skip("recompute_granularity says what is computed again")
    else:
        granularity = found.get(f"{MEGATRON}.recompute_granularity") or "full"
        to("training.recompute", {True: granularity, False: "none", None: None})(found)


def granularity_holds(found: Found) -> bool:
    """Return whether named recomputation applies. NeMo-RL reads it with activation_checkpointing; an override, or a
    recipe without that switch, also counts."""
    switch, name = f"{MEGATRON}.activation_checkpointing", f"{MEGATRON}.recompute_granularity"
    given = found.result.overridden
    return bool(found.get(name)) and (found.get(switch) is None or (name in given and switch not in given))


def adapted_layers(found: Found) -> None:
    """Map layers to groups of layers; none named means all of them."""
    groups = sorted({ADAPTED[layer] for layer in found.value or ADAPTED if layer in ADAPTED})
    if set(found.value or ADAPTED) == {layer for layer, group in ADAPTED.items() if group in groups}:
        found.map("training.lora.targets", groups)
        return
    why = "adapters are on both layers of attention (linear_qkv, linear_proj), of the MLP (linear_fc1, linear_fc2)"
    found.say("not yet", f"{why}, or of both")


def handed_on(key: str) -> str:
    """Return the key of rlctl's section that hands a key of `HANDED_ON` on."""
    prefix = next(prefix for prefix in HANDED_ON if key.startswith(f"{prefix}."))
    return f"{HANDED_ON[prefix]}.{key.removeprefix(prefix).lstrip('.')}"


def is_field(key: str) -> bool:
    """Return whether the installed Megatron-Core or vLLM has the field that a key is handed on as."""
    return any(key.startswith(f"{prefix}.") for prefix in HANDED_ON) and installed_field(handed_on(key)) is not None


def passes(otherwise: Rule | None = None) -> Rule:
    """Return the rule that passes the key on; `otherwise` if the installed version lacks it (None: unknown key)."""
    return lambda found: hand_on(found, handed_on(found.name), otherwise)


def batches(found: Found) -> None:
    """Map `train_global_batch_size`, the rollouts of an optimizer step."""
    rollouts, size = step_rollouts(found), found.value
    if of_texts(found.result):
        found.map("batch.prompts", size)
        return
    if rollouts % size:
        found.say("not yet", f"it does not divide the {rollouts} rollouts of a step", "batch.optimizer_steps")
        return
    found.set("batch.optimizer_steps", rollouts // size)
    found.say("mapped", f"batch.optimizer_steps: {rollouts // size} of {rollouts} rollouts")


def correction(found: Found) -> None:
    """Map the importance weights between engine and trainer: truncated (tis), or dropped outside of bounds (icepop)."""
    ratio = "loss_fn.truncated_importance_sampling"
    cap, least = found.get(f"{ratio}_ratio"), found.get(f"{ratio}_ratio_min")
    kind = found.get(f"{ratio}_type") or "tis"
    if not found.value and (found.get("grpo.async_grpo.enabled") or found.get("async_rl.sampler.name")):
        values = {"loss.importance_correction": "off", "rollouts.uncorrected": True}
        found.map_all(
            values, "rollouts of older weights are trained on as if the policy had sampled them, as the recipe has it"
        )
    elif not found.value:
        found.map("loss.importance_correction", "off")
    elif cap is None:
        found.map_all({"loss.importance_cap": NO_CAP, "loss.importance_correction": "truncated"})
    elif kind == "seq-mask-tis" and least is not None:
        found.map_all({"loss.sequence_mask": [least, cap], "loss.importance_correction": "untruncated"})
    elif kind == "tis":
        floor = {"loss.importance_floor": least} if least else {}
        found.map_all({"loss.importance_cap": cap, **floor, "loss.importance_correction": "truncated"})
    elif kind == "icepop" and least is not None:
        bounds = {"loss.importance_cap": cap, "loss.importance_floor": least}
        found.map_all({**bounds, "loss.importance_correction": "masked"})
    else:
        found.say("not yet", f"{kind}, {least} to {cap}, is not known", "loss.importance_correction")


def positive_nll(found: Found) -> None:
    """Map the weight of right answers' likelihood, which NeMo-RL computes only in PPO; its GRPO batches have no
    rewards."""
    if not found.value:
        found.skip("there is none")
    elif found.result.values.get("run.algorithm") == "ppo":
        found.map("loss.positive_nll_weight", found.value)
    else:
        found.skip("NeMo-RL has it in PPO alone")


def error_mask(found: Found) -> None:
    if found.value is None:
        found.map("loss.error_mask", None)
    else:
        why = "a rollout beyond it is not learned from, and still counts in the average of the loss"
        found.map_all({"loss.error_mask": found.value}, why)


def on_policy_ratio(found: Found) -> None:
    """A batch of one optimizer step has ratio 1 anyway."""
    if found.value and found.get("policy.train_global_batch_size") != step_rollouts(found):
        found.say("not yet", "the ratio is 1 in the first optimizer step of a batch, and there are several")
    else:
        found.skip("what rlctl does")


def decay_steps(found: Found) -> None:
    style = found.leaves.get(f"{MEGATRON}.scheduler.lr_decay_style", "constant")
    if style == "constant" or found.value in (None, found.get("max_num_steps", *STEPS)):
        found.skip("the learning rate decays over run.steps, if at all")
    else:
        found.map("scheduler.decay_steps", found.value)


def weight_decay_ends(found: Found) -> None:
    ends = [found.get(f"{MEGATRON}.scheduler.{end}_weight_decay") for end in ("start", "end")]
    if None in ends or ends == 2 * [found.get(f"{MEGATRON}.optimizer.weight_decay")]:
        found.skip("optimizer.weight_decay")
    else:
        found.map(f"scheduler.{found.name.rpartition('.')[2]}", found.value)


def betas(found: Found) -> None:
    beta1, beta2 = found.value
    found.map_all({"optimizer.beta1": beta1, "optimizer.beta2": beta2})


AHEAD = "each step of the warm-up has the learning rate that the next one has in NeMo-RL, whose first has the lowest"
"""NeMo-RL's schedules start one step later: Megatron and torch count finished steps, rlctl the current one."""


def warm_up(found: Found) -> None:
    begins = found.get(f"{found.name.rpartition('.')[0]}.lr_warmup_init") or 0
    if not found.value or begins == learning_rate(found)[1]:
        found.map("scheduler.warmup_steps", found.value)
    else:
        found.map_all({"scheduler.warmup_steps": found.value}, AHEAD)


TORCH_ARGUMENTS = {
    "LinearLR": {"start_factor", "end_factor", "total_iters"},
    "ConstantLR": {"factor", "total_iters"},
    "CosineAnnealingLR": {"T_max", "eta_min"},
}
"""Schedulers of torch that rlctl knows, and their arguments."""


def torch_schedulers(found: Found) -> None:
    """Map torch's schedulers: linear warm-up, then constant, linear or cosine. `milestones` are SequentialLR's switch
    steps."""
    if found.value is None:
        found.skip("the learning rate is constant")
        return
    milestones = next((step["milestones"] for step in found.value if step.get("milestones")), None)
    steps = [(str(step["name"]).rpartition(".")[2], step.get("kwargs") or {}) for step in found.value if "name" in step]
    unknown = [key for name, options in steps for key in set(options) - TORCH_ARGUMENTS.get(name, set(options))]
    warmup = steps.pop(0)[1] if steps and steps[0][0] == "LinearLR" and steps[0][1].get("end_factor", 1) == 1 else None
    kind, options = steps[0] if steps else ("ConstantLR", {"factor": 1})
    name, rate = learning_rate(found)
    # What a scheduler's arguments leave out is torch's default.
    known = kind == "CosineAnnealingLR" or (kind == "ConstantLR" and options.get("factor", 1 / 3) == 1)
    known = known or (kind == "LinearLR" and options.get("start_factor", 1 / 3) == 1)
    warmup_steps = 0 if warmup is None else warmup.get("total_iters", 5)
    next_at = milestones[0] if warmup is not None and steps and milestones else warmup_steps
    if not isinstance(rate, int | float):
        found.say("not yet", f"{name} is {short(repr(rate))}, which is not a number")
    elif unknown:
        found.say("not yet", f"rlctl knows no argument {', '.join(unknown)} of torch's schedulers", "scheduler.decay")
    elif len(steps) > 1 or not known:
        found.say(
            "not yet", "rlctl knows a linear warm-up, then a constant rate, a line or a cosine", "scheduler.decay"
        )
    elif next_at < warmup_steps or (next_at > warmup_steps and kind != "ConstantLR"):
        why = f"the warm-up takes {warmup_steps} steps (total_iters), and milestones goes on after {next_at}"
        found.say("not yet", f"{why}: give both the same number", "scheduler.warmup_steps")
    else:
        begins = rate if warmup is None else float(f"{warmup.get('start_factor', 1 / 3) * rate:.12g}")
        found.set("scheduler.warmup_steps", warmup_steps)
        found.set("scheduler.init_lr", 0 if warmup is None else begins)
        if kind == "CosineAnnealingLR":
            found.set("scheduler.decay", "cosine")
            found.set("scheduler.min_lr", options.get("eta_min", 0))
            found.set("scheduler.decay_steps", warmup_steps + options.get("T_max", 1))
        elif kind == "LinearLR":
            found.set("scheduler.decay", "linear")
            found.set("scheduler.min_lr", rate * options.get("end_factor", 1))
            found.set("scheduler.decay_steps", warmup_steps + options.get("total_iters", 5))
        note = f"scheduler: {warmup_steps} steps of warm-up, then {kind}"
        found.say(*(("mapped", note) if begins == rate else ("changed", f"{note}; {AHEAD}")))


def expert_engines(found: Found) -> None:
    """Map the ranks that share an engine's experts: more than its tensors have where it has replicas."""
    if found.value is None:
        found.map("generation.ep", None)
    else:
        found.map_all({"generation.ep": found.value, "generation.dp": engine_copies(found)})


def engine_copies(found: Found) -> int:
    ep, tp = (found.get(f"{VLLM}.{kind}_parallel_size") or 1 for kind in ("expert", "tensor"))
    return max(1, ep // tp)


DATA = ("data.train.", "data.default.", "data.")
"""Places of training data in a recipe: `data.train`, the datasets' defaults, or `data` in older recipes."""
VALIDATION = ("data.validation.", "data.default.", "data.")


def responses(found: Found, path: str | None, places: Iterable[str]) -> tuple[str, str, str, None] | None:
    """Return name, fields and split of a ResponseDataset; None where the recipe has no path for it."""
    subset = found.get("subset", *places)
    name = f"{path}:{subset}" if subset else str(path)
    prompt, answer = found.get("input_key", *places) or "input", found.get("output_key", *places) or "output"
    return (name, prompt, answer, None) if path else None


def validation_set(found: Found) -> tuple[str, str | None, str | None, str | None] | None:
    """Return name, fields and default split of validation rows; None if rlctl cannot read them, such as a split of
    training data."""
    if environment_used(found.leaves) == PUZZLE:
        return None
    path = found.get("data.validation.data_path") or found.get("data.val_data_path")
    name = found.get("data.validation.dataset_name")
    if name is None and path:
        name = found.get("data.default.dataset_name") or BY_PATH[0]
    return named_data(found, name, path, VALIDATION)


PLAIN = "arrow_text"
"""The data set of plain texts."""
BY_PATH = ("ResponseDataset", "BinaryPreferenceDataset", "PreferenceDataset", "openai_format")
"""NeMo-RL's classes of data sets that are files, or are on the hub."""


def data_sets(found: Found) -> Mapping[str, tuple[str, str | None, str | None, str | None]]:
    """Return the data sets of the recipe's algorithm that rlctl knows."""
    algorithm = str(found.result.values.get("run.algorithm"))
    return PAIR_DATASETS if algorithm in OF_PAIRS else {"sft": TEXT_DATASETS}.get(algorithm, DATASETS)


def named_data(
    found: Found, name: Any, path: str | None, places: Iterable[str]
) -> tuple[str, str | None, str | None, str | None] | None:
    """Return name, fields and default split of a data set; None where rlctl does not know it."""
    if name == PLAIN:
        return data_files(found)
    if name == GYM_DATA:
        return (path, None, None, None) if path else None
    if name in CLEVR:
        part = CLEVR_PARTS.get(str(found.get("split", *places) or "train"))
        return (part, "problem", "solution", "train") if part else None
    if name == MMPR:
        folder = found.get("download_dir", *places)
        fields = ("extra_info.question", "reward_model.ground_truth", None)
        return (f"{folder}/mmpr_tiny.parquet", *fields) if folder else None
    if name not in BY_PATH:
        return {**data_sets(found), **IMAGE_DATASETS}.get(str(name))
    algorithm = found.result.values.get("run.algorithm")
    if name == "openai_format":  # rlctl reads conversations and tools by these names alone
        usual = {"chat_key": "messages", "tool_key": "tools", "system_key": None}
        own = all(found.get(key, *places) in (None, value) for key, value in usual.items())
        return (path, None, None, None) if path and own and algorithm == "sft" else None
    if algorithm not in OF_PAIRS:
        return responses(found, path, places) if name == BY_PATH[0] else None
    return pairs_of_path(found, path, places, "context" if name == "PreferenceDataset" else "prompt")


def validated(rule: Rule) -> Rule:
    """Return the rule of a key of validation, for recipes whose validation prompts can be read."""
    why = "the recipe names no prompts of validation that rlctl can read: set validation.every with "
    return when(
        lambda found: validation_set(found) or holds_out(found),
        rule,
        logs(f"{why}validation.data.name or validation.holdout"),
    )


def holds_out(found: Found) -> bool:
    """Return whether a recipe validates on a number of its plain texts."""
    size, plain = found.get("split_validation_size", *DATA), found.get("dataset_name", *DATA) == PLAIN
    return plain and isinstance(size, int) and size > 0


def validation_period(found: Found) -> None:
    """Map the validation interval and data; NeMo-RL samples as in training."""
    values = dict(zip(("name", "prompt_field", "answer_field", "split"), validation_set(found) or (), strict=False))
    if found.get("data.validation.dataset_name") not in CLEVR:  # whose splits are data sets of their own
        values["split"] = found.get("data.validation.split") or values.get("split")
    for key, value in values.items():
        if value is not None:
            found.set(f"validation.data.{key}", value)
    if not of_texts(found.result):
        own = found.get("policy.generation.val_temperature")
        found.set("validation.temperature", found.get("policy.generation.temperature") or 1.0 if own is None else own)
    # NeMo-RL validates periodically where the number is above 0, and recipes write -1 as well as 0.
    found.map("validation.every", found.value and max(0, found.value))


def validation_batches(found: Found) -> None:
    """Map the number of batches that texts are validated on; 0 or less are all of them."""
    section = found.name.partition(".")[0]
    size = found.get(f"{section}.val_global_batch_size") or 1
    found.map("validation.max_prompts", found.value * size if found.value > 0 else 2**31 - 1)


def dataset(found: Found) -> None:
    if found.value != found.get("dataset_name", *DATA):
        found.skip("data.train has its own")
        return
    path = found.get("data_path", *DATA) or found.get("train_data_path", *DATA)
    if found.value == GYM_DATA and not path:
        found.say("changed", "the recipe leaves it to the command line where the rows are: name them with --data")
        return
    if (known := named_data(found, found.value, path, DATA)) is None:
        by_path = BY_PATH[1:3] if found.result.values.get("run.algorithm") in OF_PAIRS else BY_PATH[::3]
        names = f"{', '.join((*data_sets(found), *ALL_IMAGE_DATA))}, and {' and '.join(by_path)} with a data_path"
        names = f"rlctl knows {names}; --data names another"
        found.say("not yet", names, "data.name")
        return
    name, prompt, answer, split = known
    answer = answer and (found.get("output_key", *DATA) or answer)
    fields = {key: field for key, field in {"prompt_field": prompt, "answer_field": answer}.items() if field}
    for key, value in {"name": name, **fields}.items():
        found.set(f"data.{key}", value)
    if split and (found.value in CLEVR or found.get("split", *DATA) is None):
        found.set("data.split", split)
    if found.value in CLEVR:
        found.set("data.answer_pattern", IN_ANSWER_TAGS)
    if found.value == REFCOCO:
        found.set("data.image_folder", found.get("download_dir", *DATA) or "coco_images")
        why = (
            "pictures keep their shape, where NeMo-RL makes squares of 256 x 256; a row keeps its caption in all epochs"
        )
        found.say("changed", f"data.name: {name}; {why}")
        return
    found.say("mapped", f"data.name: {name}" + (f", fields {' and '.join(fields.values())}" if fields else ""))


def split(found: Found) -> None:
    """Map the split, but for data whose splits are data sets of their own."""
    when(lambda found: found.get("dataset_name", *DATA) not in CLEVR, to("data.split"), "read with dataset_name")(found)


def pairs_of_path(
    found: Found, path: str | None, places: Iterable[str], prompt: str
) -> tuple[str, str, None, None] | None:
    """Return name and prompt field (default `prompt`) of preferences; None without a path or with other completion
    names."""
    subset = found.get("subset", *places)
    named = all(found.get(f"{name}_key", *places) in (None, name) for name in ("chosen", "rejected"))
    prompt = found.get("prompt_key", *places) or prompt
    return (f"{path}:{subset}" if subset else path, prompt, None, None) if path and named else None


def folders_of(found: Found) -> tuple[Path, ...]:
    """Return the folders that a path of the recipe may be relative to: the current one, and those above its files."""
    return (Path(), *dict.fromkeys(folder for file in found.result.files for folder in file.parents))


def text_file(found: Found, key: str) -> str | None:
    """Return a prompt file's text, relative to NeMo-RL's start directory; None, with the reason recorded, if missing.
    `key` replaces the file."""
    if found.name.startswith("data.default.") and found.name.replace("default", "train", 1) in found.leaves:
        found.skip("data.train has its own")
        return None
    if found.value is None:
        found.skip("there is none")
        return None
    for path in (folder / str(found.value) for folder in folders_of(found)):
        if os.path.isfile(path):
            return read_text(path, found.name)
    found.say("not yet", f"there is no such file here or above the recipe: put it there, or set {key}", key)
    return None


def prompt_file(found: Found) -> None:
    """Map a prompt template, which Python's `format` fills in: `{}` is the question and a brace is written twice."""
    if (text := text_file(found, "data.prompt_template")) is None:
        return
    parts = re.split(r"(?<!\{)\{\}(?!\})", text.strip("\n"))
    if len(parts) != 2:
        found.say("not yet", "a template has one {}, where the question stands", "data.prompt_template")
        return
    texts = [part.replace("{{", "{").replace("}}", "}") for part in parts]
    # Such braces would name a column in rlctl's template: Jinja can say that they are text.
    if any(re.search(r"\{\w+\}|\{\{|\{%", text) for text in texts):
        found.map("data.prompt_template", "{{ prompt }}".join(f"{{% raw %}}{text}{{% endraw %}}" for text in texts))
    else:
        found.map("data.prompt_template", "{prompt}".join(texts))


def system_prompt_file(found: Found) -> None:
    if (text := text_file(found, "data.system_prompt")) is not None:
        found.map("data.system_prompt", text)


PUZZLE = "sliding_puzzle_game"
"""The puzzle's section, whose script makes the prompts."""


def environment_used(leaves: Mapping[str, Any]) -> str | None:
    """Return the scoring environment: the puzzle, else the data's, else one other than math, else math (also for
    section `dapo`)."""
    if any(key.startswith(f"env.{PUZZLE}.") for key in leaves):
        return PUZZLE
    if leaves.get("env.should_use_nemo_gym") is True:
        return GYM
    named = next((leaves[f"{place}env_name"] for place in DATA if leaves.get(f"{place}env_name") is not None), None)
    present = dict.fromkeys(key.split(".")[1] for key in leaves if key.startswith("env.") and key.count(".") > 1)
    return named or next((name for name in present if name not in ("math", "dapo")), "math" if present else None)


def environment(found: Found) -> None:
    """Say once that an environment is not there yet; math is (`finish` sets the reward)."""
    name, used = found.name.split(".")[1], environment_used(found.leaves)
    if name != used:
        found.skip(f"the data's environment is {used}" if used else "there is no environment")
    elif found.name == f"env.{name}.reward_functions":
        reward_functions(found)
    elif f"env.{name}.reward_functions" in found.leaves:
        found.skip("rewards are computed in processes of their own")
    elif any(entry.key.startswith(f"env.{name}.") and entry.status == "not yet" for entry in found.result.entries):
        found.skip(f"it belongs to the environment {name}")
    else:
        why = f"the environment {name} is not there yet; --reward names rlctl's own rewards"
        found.say("not yet", why, "reward.terms")


REWARD_FUNCTIONS = ("format", "exact_alnum", "math_expr", "bbox_giou", "geo3k")
"""Rewards of NeMo-RL's environments of images; rlctl's have the same names and arguments."""


def reward_functions(found: Found) -> None:
    """Map weighted rewards. NeMo-RL divides the weights by their sum."""
    total = sum(one["weight"] for one in found.value)
    unknown = [one["name"] for one in found.value if one["name"] not in REWARD_FUNCTIONS]
    if unknown or not total:
        why = f"rlctl knows {', '.join(REWARD_FUNCTIONS)}, with weights whose sum is not 0"
        found.say("not yet", f"{why}; --reward names another", "reward.terms")
        return
    terms = [
        {"name": one["name"], "weight": float(f"{one['weight'] / total:.12g}")}
        | ({"params": dict(one["kwargs"])} if one.get("kwargs") else {})
        for one in found.value
    ]
    found.map("reward.terms", terms)


def gym(found: Found) -> None:
    if environment_used(found.leaves) != GYM:
        environment(found)
    elif found.name.removeprefix(f"env.{GYM}.") in MARKS:
        marks(found)
    elif any(entry.key.startswith(f"env.{GYM}.") and entry.status == "changed" for entry in found.result.entries):
        found.skip("NeMo Gym is started with it")
    else:
        where = "its address is --set environment.params.head=http://HOST:PORT"
        found.say(
            "changed", f"start NeMo Gym with this section and vllm_model.yaml in place of the one for training; {where}"
        )


def of_turns(key: str) -> Rule:
    """Return the rule of the advantage of turns that have a fault, as the environment NeMo Gym finds them."""
    gym_alone = only(None, why="NeMo-RL knows such turns in NeMo Gym alone")
    return when(lambda found: environment_used(found.leaves) == GYM, to(key), gym_alone)


MARKS = {
    "thinking_tags": ["<think>", "</think>"],
    "invalid_tool_call_patterns": ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"],
}
"""Texts by which NeMo-RL knows turns with a fault: its defaults, which are rlctl's."""


def marks(found: Found) -> None:
    """Accept only rlctl's marks of faulty turns."""
    known = MARKS[found.name.rpartition(".")[2]]
    only(None, known, why=f"turns with a fault are known by {', '.join(known)}")(found)


PENALTIES = {
    "penalize_duplicated_reasoning": "duplicated-thinking",
    "penalize_empty_final_answer": "empty-answer",
    "penalize_malformed_think_tag": "malformed-thinking",
}
"""NeMo-RL's switches, and rlctl's names of faults that take the reward of an episode of NeMo Gym."""


def penalty(found: Found) -> None:
    """Map what takes the reward of an episode."""
    name, unwanted = found.name.rpartition(".")[2], found.get("reward_penalties.token_ids.unwanted")
    if not found.value:
        found.skip("it is off")
    elif environment_used(found.leaves) != GYM:
        found.say("not yet", "NeMo-RL knows it in NeMo Gym alone", "environment.no_reward")
    elif name in PENALTIES:
        so_far = found.result.values.get("environment.no_reward", [])
        tags = "tags are looked for in texts, and not by their token ids" if name.endswith("think_tag") else None
        found.map_all({"environment.no_reward": [*so_far, PENALTIES[name]]}, tags)
    elif unwanted and name == "penalize_unwanted_tokens":
        found.map("environment.unwanted_tokens", [unwanted] if isinstance(unwanted, int) else unwanted)
    else:
        found.say("not yet", "it needs reward_penalties.token_ids.unwanted", "environment.unwanted_tokens")


def scored_by_model(found: Found) -> None:
    """Map a recipe's reward model, which scores in its published precision."""
    if environment_used(found.leaves) != "reward_model":
        environment(found)
    else:
        terms = [{"name": f"model:{found.value}"}]
        how = "it reads the prompt as the data has it, and is computed in float32 on processors"
        found.map_all({"reward.terms": terms}, how)


def of_reward_model(found: Found) -> None:
    if environment_used(found.leaves) == "reward_model":
        found.skip("scores do not depend on it: reward.terms names the reward model")
    else:
        environment(found)


def with_turns(rule: Rule, otherwise: Rule) -> Rule:
    """Return the rule of a key of turns, which `rule` maps where the recipe has an environment with turns."""
    return when(lambda found: environment_used(found.leaves) == PUZZLE, rule, otherwise)


def when_math(rule: Rule) -> Rule:
    return when(lambda found: environment_used(found.leaves) == "math", rule, environment)


def variables(key: str) -> Rule:
    """Return the rule of an environment variable of processes, which `key` (an open mapping) passes on."""

    def rule(found: Found) -> None:
        name = found.name.rpartition(".")[2]
        if name.startswith("NRL_"):
            found.skip("it is NeMo-RL's own")
        elif found.value is None:
            found.skip("unset")
        else:
            found.map(f"{key}.{name}", str(found.value))

    return rule


def dynamic_batching(found: Found) -> None:
    """Pad rows instead of packing them. NeMo-RL refuses both together; here packing wins."""
    if found.value is not True:
        found.skip("rows of training.micro_batch_tokens")
    elif found.get("policy.sequence_packing.enabled") is True:
        found.say("changed", "rows are packed; NeMo-RL refuses to start with policy.sequence_packing and this both on")
    else:
        found.map_all({"training.packing": False, "training.dynamic_batching": True})


def kept_checkpoints(found: Found) -> None:
    """Keep the newest checkpoints without a metric, else the best by mean reward (validation if every checkpoint has
    one)."""
    metric, highest = found.get("checkpointing.metric_name"), found.get("checkpointing.higher_is_better") is not False
    every, saves = found.get("val_period", *STEPS) or 0, found.get("checkpointing.save_period") or 0
    if found.get("checkpointing.enabled") is False:
        found.skip("checkpoints are off")
        return
    if found.value is None or metric is None:
        found.map("run.keep_last", found.value)
        return
    found.set("run.keep_best", found.value)
    kept = f"run.keep_best: {found.value}, by the mean reward of"
    at_each = validation_set(found) and every > 0 and saves % every == 0
    if at_each and highest and re.match("val(?!.*loss)", str(metric)):
        found.set("run.keep_best_by", "validation/reward_mean")
        found.say("mapped", f"{kept} validation, every {every} steps")
    else:
        theirs = str(metric) if highest else f"the lowest {metric}"
        found.say("changed", f"{kept} training instead of {theirs}; and the newest")


LOGGERS = {
    "logger.tensorboard_enabled": "tensorboard",
    "logger.wandb_enabled": "wandb",
    "logger.mlflow_enabled": "mlflow",
}
"""Switches of loggers, and rlctl's names of these."""


def loggers(found: Found) -> None:
    found.map("run.loggers", [name for key, name in LOGGERS.items() if found.get(key) is True])


def logged_as(key: str, logger: str) -> Rule:
    """Return the rule of a logger's run name; rlctl uses the first enabled logger's name for all."""

    def rule(found: Found) -> None:
        first = next((name for switch, name in LOGGERS.items() if name != "tensorboard" and found.get(switch)), None)
        if first == logger:
            found.map(key, found.value)
        else:
            other = f"all loggers use {key}, which is that of {first}"
            found.say("logging", f"{logger} is off" if first is None else other)

    return rule


SAMPLERS = {
    "in_order": ("position", None),
    "weight_fifo": ("arrival", "groups that finished first come first, and old ones are waited for"),
    "ready_first": ("arrival", "groups that are as old as they may be are waited for"),
    "windowed": ("arrival", "only what can still be trained on is begun, and nothing is thrown away"),
}
"""Samplers of NeMo-RL's single controller: `rollouts.order`, and in which way it differs."""


def sampler(found: Found) -> None:
    """Map the single controller's batches and staleness. Its engines always continue under new weights."""
    name = found.get("async_rl.sampler.name") or "in_order"
    if name not in SAMPLERS:
        found.say("not yet", f"rlctl has rollouts.order, and knows {', '.join(SAMPLERS)}", "rollouts.order")
        return
    order, otherwise = SAMPLERS[name]
    knob = found.get(f"async_rl.sampler.{'max_lookahead' if name == 'in_order' else 'max_staleness'}_versions")
    lag = 1 if knob is None else knob
    if lag == 0:
        found.map("rollouts.mode", "sync")
        return
    ages = {"rollouts.mode": "async", "rollouts.max_staleness": lag, "refit.in_flight": "keep"}
    found.map_all({**ages, "rollouts.order": order}, otherwise)


def engine_devices(found: Found) -> None:
    """Map the devices that engines have to themselves, and the number of engines on them."""
    resources = "policy.generation.colocated.resources"
    if found.get("policy.generation.colocated.enabled") is not False:
        found.skip("policy and engines are on the same devices")
    elif found.name != f"{resources}.gpus_per_node" and found.get(f"{resources}.gpus_per_node") is not None:
        found.skip(f"read with {resources}.gpus_per_node")
    else:
        per_node = found.get(f"{resources}.gpus_per_node") or found.get("cluster.gpus_per_node") or 1
        devices = (found.get(f"{resources}.num_nodes") or 1) * per_node
        tp, pp = (found.get(f"{VLLM}.{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline"))
        engines = max(1, devices // (tp * pp * engine_copies(found)))
        found.map_all({"generation.engines": engines, "generation.devices": devices})


def checkpoints_on(found: Found) -> None:
    found.map("run.save_final", bool(found.value))
    if not found.value:
        found.set("run.checkpoint_every", 0)

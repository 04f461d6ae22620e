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
from rlctl.recipes.rules import Leaf, Rule, differs, hand_on, logs, only, to, when

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
"""Names on the hub of CLEVR-CoGenT's splits; each dataset has one split, `train`."""
IMAGE_DATASETS = {
    "geometry3k": ("hiyouga/geometry3k", "problem", "answer", None),
    REFCOCO: ("jxu124/refcoco", None, None, None),
}
"""Data sets with images in all algorithms, in the form of `DATASETS`, next to the ones above."""
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

    def rule(leaf: Leaf) -> None:
        changed = leaf.name in leaf.result.overridden and leaf.value != leaf.result.before.get(leaf.name)
        if changed and leaf.name.startswith(MEGATRON) and is_field(leaf.name):
            passes()(leaf)
        else:
            leaf.skip(reason)

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
    """Return why a recipe's key has no effect (its section is off or belongs to a part that rlctl lacks); None: it has
    an effect."""
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


ONE_TEACHER = "teachers.0"
"""The first entry of off-policy distillation's list of teachers, with its tokenizer."""
OF_TEXTS = ("sft", "dpo", "rm")
ALGORITHMS = (*OF_TEXTS, "distillation")
"""Sections of NeMo-RL's other algorithms than GRPO."""
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
    """Return the names of a recipe's data sets, single or in lists, by key."""
    names = {f"{place}.dataset_name": leaves.get(f"{place}.dataset_name") for place in PLACES}
    for place in PLACES:
        listed = leaves.get(place)
        for index, each in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(each, Mapping):
                names[f"{place}.{index}.dataset_name"] = each.get("dataset_name")
    return {key: name for key, name in names.items() if name is not None}


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
        and not any(name in ALL_IMAGE_DATA for name in data_names(leaves).values())
    ):
        key, kind = "policy.model_name", "sound or video"
    if key is None:
        return None
    value = data_names(leaves).get(key, leaves.get(key))
    return f"This recipe trains on {kind} ({key} = {short(value)}), and rlctl trains on texts and images."


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
        return "This recipe distills and names no teacher (`teacher.model_name`, or `teachers`).", algorithm
    return None, "grpo" if "grpo" in sections else None


AGENTS = "on_policy_distillation.teacher_model_by_agent_name."
"""The teacher of each agent of NeMo Gym."""


def agents_teachers(leaves: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the agents of NeMo Gym of each teacher."""
    agents: dict[str, list[str]] = {}
    for key, value in leaves.items():
        if key.startswith(AGENTS):
            agents.setdefault(str(value), []).append(key.removeprefix(AGENTS))
    return agents


def agents_teacher(leaf: Leaf) -> None:
    """Map the teachers of all agents: one, or one by the agent that a row names. The default one has the other rows."""
    agents, default = agents_teachers(leaf.leaves), leaf.get("on_policy_distillation.default_teacher_alias")
    if len(agents) == 1:
        leaf.map_all({"teacher.model": leaf.value})
        return
    falls_back = default is not None and not leaf.get("on_policy_distillation.strict_agent_name_match")
    models = [
        {"model": model, "sources": [*names, *(["*"] if falls_back and default in names else [])]}
        for model, names in agents.items()
    ]
    leaf.map_all({"teacher.field": "agent_ref.name", "teacher.models": models})


def distills(rule: Rule) -> Rule:
    """Return the rule of a key of distillation on the rollouts of NeMo Gym's agents."""
    return when(
        lambda leaf: leaf.get("on_policy_distillation.enabled") is True, rule, "on_policy_distillation is off"
    )  # fmt: skip


def no_ratio(leaf: Leaf) -> None:
    """Map a loss without PPO's ratio, which is 1 where a batch is one optimizer step."""
    if leaf.value and step_rollouts(leaf) != leaf.get("policy.train_global_batch_size"):
        leaf.say("not yet", "with several optimizer steps of a batch the loss has the ratio of PPO", "loss.clip_low")
    else:
        leaf.skip("with one optimizer step of a batch the ratio is 1" if leaf.value else "what rlctl does")


STEPS = ("grpo.", "distillation.", "sft.", "dpo.", "rm.")
"""The sections of the algorithms that rlctl runs."""


def of_texts(result: Import) -> bool:
    return result.values.get("run.algorithm") in (*OF_TEXTS, "distill")


def across_tokenizers(rule: Rule, otherwise: str | Rule = "the teacher has the policy's tokenizer") -> Rule:
    """Return the rule of a key for off-policy distillation, whose teacher has another tokenizer."""
    return when(lambda leaf: leaf.result.values.get("run.algorithm") == "distill", rule, otherwise)


FURTHER = re.compile(r"teachers\.(\d+)\.")
"""A key of a teacher behind the first, whose keys are read as of the section `teacher`."""


def weights_of_teachers(leaf: Leaf) -> dict[str, float]:
    """Return the weight of each of `teachers`, by the beginning of its keys."""
    further = dict.fromkeys(found[0] for key in leaf.leaves if (found := FURTHER.match(key)))
    weights = {place: leaf.get(f"{place}weight") for place in ("teacher.", *further)}
    return {place: 1.0 if weight is None else weight for place, weight in weights.items()}


def several_teachers(leaf: Leaf) -> bool:
    return len(weights_of_teachers(leaf)) > 1


def teachers_of_texts(leaf: Leaf) -> None:
    """Map the teachers of plain texts. Several are compared one by one, each with its own tokenizer; for one with the
    policy's tokens that is the same divergence."""
    weights = weights_of_teachers(leaf)
    if len(weights) == 1:
        leaf.map("teacher.model", leaf.value)
        return
    models = [
        {"model": leaf.get(f"{place}model_name"), "weight": weight, "own_tokenizer": True}
        for place, weight in weights.items()
    ]
    leaf.map_all({"teacher.models": models, "teacher.mix": "divergences"})


def further_teacher(leaf: Leaf) -> None:
    """Map a key of a teacher behind the first that `teachers_of_texts` does not read."""
    name = FURTHER.sub("", leaf.name)
    if name in ("model_name", "weight"):
        leaf.skip("read with teachers.0.model_name")
    elif leaf.value == leaf.get(f"teacher.{name}"):
        leaf.skip("as of the first teacher")
    elif name.endswith("parallel_size"):
        leaf.say("changed", "all teachers have the layout of the first")
    else:
        leaf.skip("the teacher has its own tokenizer and computes log-probs alone, on the rows of training")


def loss_scaling(leaf: Leaf) -> None:
    """Map whether the divergence is scaled to the cross entropy, which has the weight 1 then. The recipe's divergences
    are multiplied by the teachers' weights, and rlctl's by their shares."""
    if leaf.value:
        leaf.map_all({"distillation.balanced": True, "distillation.sft_weight": 1.0})
    else:
        reason = "the divergence of chunks is averaged over all tokens of a batch, and not over its chunks"
        total = sum(weights_of_teachers(leaf).values()) if several_teachers(leaf) else 1.0
        leaf.set("distillation.weight", total * (leaf.get("loss_fn.kl_loss_weight") or 1.0))
        leaf.set("distillation.sft_weight", leaf.get("loss_fn.ce_loss_scale") or 0.0)
        leaf.say("changed", reason)


def data_files(leaf: Leaf) -> tuple[str, None, None, None] | None:
    """Return the name of plain texts: a file of rows, or the part of a data set of the hub that files are of."""
    path, subset = str(leaf.get("data_files", *DATA)), leaf.get("subset", *DATA)
    if files := re.fullmatch(r"hf://datasets/([^/]+/[^/]+)/([^/*]+)/[^/]*", path):
        return f"{files[1]}:{files[2]}", None, None, None
    if path.endswith((".jsonl", ".json", ".csv", ".parquet")) and "*" not in path and "://" not in path:
        return path, None, None, None
    return None if re.search(r"[*]|://|\.\w+$", path) else (f"{path}:{subset}" if subset else path, None, None, None)


def average_of_texts(leaf: Leaf) -> None:
    """The supervised part of a DPO loss is averaged over tokens where the preferences are."""
    same = bool(leaf.value) == bool(leaf.get("dpo.preference_average_log_probs"))
    if same or not leaf.get("dpo.sft_loss_weight"):
        leaf.skip("read with dpo.preference_average_log_probs")
    else:
        leaf.say("not yet", "it is averaged where dpo.preference_average_log_probs is on", "preference.average")


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
        # Up to version 0.3 prompts were used as written, except in data sets with a random split.
        if leaves.get("data.dataset_name") != "OpenMathInstruct-2":
            values["data.shuffle"] = False
    if any(key.startswith(f"{MEGATRON}.scheduler.") for key in leaves):
        values[f"{MEGATRON}.scheduler.lr_decay_style"] = "linear"
    if leaves.get(f"{MEGATRON}.scheduler.lr_decay_style") == "WSD":
        values[f"{MEGATRON}.scheduler.lr_wsd_decay_style"] = "exponential"
    return {key: value for key, value in values.items() if key not in leaves}


def step_rollouts(leaf: Leaf) -> int:
    return (leaf.get("num_prompts_per_step", *STEPS) or 1) * (leaf.get("num_generations_per_prompt", *STEPS) or 1)


def kl_type(leaf: Leaf) -> None:
    """Map the direction of the divergence over the teacher's most likely tokens."""
    shares = {"forward": 1.0, "reverse": 0.0, "mixed": leaf.leaves.get("loss_fn.mixed_kl_weight", 0.5)}
    if (share := shares.get(leaf.value)) is None:
        options = "rlctl knows forward, reverse, and mixed with its mixed_kl_weight"
        leaf.say("not yet", options, "distillation.forward_share")
    else:
        leaf.map_all({"distillation.loss": "top-k", "distillation.forward_share": share})


def kl_weight(leaf: Leaf) -> None:
    """Map the weight of each token's KL penalty. NeMo-RL has one in each case since version 0.7."""
    if leaf.value:
        leaf.map("loss.kl_weight", "importance")
    elif leaf.value is None or OF_LATER in leaf.leaves:
        leaf.map("loss.kl_weight", "policy")
    else:
        leaf.skip("what rlctl does")


def sequence_ratios(leaf: Leaf) -> None:
    """Map ratios of sequences; NeMo-RL then also corrects for the engine by the product over a sequence."""
    if leaf.get("loss_fn.use_importance_sampling_correction"):
        leaf.set("loss.importance_level", "sequence")
    leaf.map("run.algorithm", "gspo")


def estimator(leaf: Leaf) -> None:
    """Map the form of advantages."""
    weights = leaf.get("grpo.adv_estimator.reward_weights")
    if leaf.value in (None, "grpo"):
        leaf.skip("what rlctl does")
    elif leaf.value == "gae" and leaf.result.values.get("run.algorithm") == "ppo":
        leaf.skip("what --algorithm ppo does")
    elif leaf.value == "opd" and leaf.get("on_policy_distillation.enabled") is True:
        leaf.map_all({"run.algorithm": "distillation", "distillation.loss": "sampled"})
    elif leaf.value == "reinforce_plus_plus":
        minus = leaf.get("grpo.adv_estimator.minus_baseline") is not False
        leaf.map("run.algorithm", "reinforce++-baseline" if minus else "reinforce++")
    elif leaf.value == "gdpo" and environment_used(leaf.leaves) == GYM and weights:
        leaf.say("not yet", "the parts of NeMo Gym's rewards have the weight 1", "advantage.per_term")
    elif leaf.value == "gdpo" and environment_used(leaf.leaves) in (MULTI_REWARD, GYM):
        leaf.map_all({"advantage.per_term": True, "advantage.whiten": True, "advantage.whiten_over": "rollouts"})
    elif leaf.value == "gdpo":
        reason = f"it compares the terms of a reward, which {MULTI_REWARD} and NeMo Gym have"
        leaf.say("not yet", reason, "reward.terms")
    else:
        leaf.say("not yet", f"{leaf.value} is not imported; rlctl has --algorithm and advantage.*", "run.algorithm")


def gae_lambda(leaf: Leaf) -> None:
    """Map lambda. NeMo-RL may use another one for returns than for advantages, or one that depends on rollout
    length."""
    ends = [leaf.get(f"grpo.adv_estimator.{name}") for name in ("gae_lambda_value", "gae_lambda_policy")]
    value, policy = (leaf.value if end is None else end for end in ends)
    if value != policy or leaf.get("grpo.adv_estimator.length_adaptive_alpha"):
        leaf.say("not yet", "the critic and the policy have one lambda (critic.gae_lambda)", "critic.gae_lambda")
    else:
        leaf.map("critic.gae_lambda", policy)


def value_clip(leaf: Leaf) -> None:
    """Map the largest movement of a value; none where NeMo-RL has no number."""
    leaf.set("critic.value_clip", leaf.value or None)
    leaf.say("mapped", f"critic.value_clip: {leaf.value or 'none'}")


def kl_in_reward(leaf: Leaf) -> None:
    """Map the place of the KL penalty: PPO's may be in the reward of each token."""
    if leaf.result.values.get("run.algorithm") == "ppo":
        leaf.map("loss.kl_in", "reward" if leaf.value else "loss")
    elif leaf.value:
        leaf.say("not yet", "it is not imported yet; rlctl has loss.kl_in=reward", "loss.kl_in")
    else:
        leaf.skip("what rlctl does")


DEEPSEEK_COPIES, DEEPSEEK = ("docs/guides/deepseek.md", "/path/to/dsv3-bf16-checkpoint"), "deepseek-ai/DeepSeek-V3"
"""Names in NeMo-RL's DeepSeek-V3 recipes that replace a model, and the model."""


def model_name(leaf: Leaf) -> None:
    """Map the model. For an unmade bfloat16 copy of DeepSeek-V3, use the published float8 model."""
    if any(name in str(leaf.value) for name in DEEPSEEK_COPIES):
        leaf.map_all({"model.name": DEEPSEEK}, "its published float8 weights are read, and no copy needs to be made")
    else:
        leaf.map("model.name", leaf.value)


def of_the_policy(leaf: Leaf) -> None:
    """The value model starts from the policy's model."""
    if leaf.value in (None, leaf.get("policy.model_name")):
        leaf.skip("the critic is of the policy's model")
    else:
        leaf.say("not yet", "the critic is of the policy's model (model.name)", "model.name")


LEARNED = re.compile(r"optimizer\.(lr|weight_decay|clip_grad)|scheduler\..*")
"""Learning keys that a critic has too."""


def critic_values(critic: Import) -> dict[str, Any]:
    """Return the critic's keys from an import that mapped the value model as a policy."""
    target_keys = {key: key.removeprefix("optimizer.") for key in critic.values if LEARNED.fullmatch(key)}
    return {f"critic.{name}": critic.values[key] for key, name in target_keys.items()}


def in_epochs(result: Import, epochs: int) -> None:
    """NeMo-RL's schedules count each pass over a batch of PPO; rlctl's count the steps."""
    counted = ("warmup_steps", "decay_steps", "wsd_steps")
    keys = [f"{section}scheduler.{name}" for section in ("", "critic.") for name in counted]
    lines = []
    for key in (key for key in keys if result.values.get(key)):
        result.values[key] = -(-result.values[key] // epochs)
        lines.append(f"{key} is {result.values[key]}")
    if lines:
        result.notes.append(f"NeMo-RL's schedules count all {epochs} passes over a batch, and rlctl's its steps: "
                            f"{', '.join(lines)}")  # fmt: skip


def of_groups(rule: Rule) -> Rule:
    """Return the rule of a key of advantages within groups, which other estimators than these do not read."""
    read = (None, "grpo", "gdpo")
    return when(lambda leaf: leaf.get("grpo.adv_estimator.name") in read, rule, "grpo.adv_estimator does not use it")


def baseline(leaf: Leaf) -> None:
    """Map the baseline of a group, of whose rollouts NeMo-RL takes the standard deviation as well."""
    to("advantage.baseline", {True: "leave-one-out", False: "mean"})(leaf)
    if isinstance(leaf.value, bool):
        leaf.set("advantage.std_of", "others" if leaf.value else "group")


TERMS = {"correctness": "tagged-answer", "format": "tagged-format", "integer": "tagged-integer"}
"""The rewards of NeMo-RL's multi-reward environment, in its order, and rlctl's."""


def multi_reward(leaf: Leaf) -> None:
    """Map the environment with several rewards, and the weights of these."""
    weights = leaf.get("grpo.adv_estimator.reward_weights") or [1.0] * len(TERMS)
    if environment_used(leaf.leaves) != MULTI_REWARD:
        environment(leaf)
    elif leaf.name.endswith(".math_verify_impl") and leaf.value not in (None, "hf_math_verify"):
        leaf.say("not yet", "NeMo-RL knows hf_math_verify here", "reward.terms")
    elif len(weights) != len(TERMS):
        leaf.say("not yet", f"reward_weights has a weight for each of {', '.join(TERMS)}", "reward.terms")
    else:
        terms = [{"name": name, "weight": weight} for name, weight in zip(TERMS.values(), weights, strict=True)]
        leaf.map_all({"reward.terms": terms, "reward.extract": "answer-tag"})


def reward_scaling(leaf: Leaf) -> None:
    """Map scaling of 0/1 rewards: shift + weight r. NeMo-RL first clamps them to the source range."""
    ends = {"source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1.0}
    bounds = {name: leaf.get(f"grpo.reward_scaling.{name}") for name in ends}
    at = ends | {name: value for name, value in bounds.items() if value is not None}
    low, width = at["source_min"], at["source_max"] - at["source_min"]
    if width <= 0:
        leaf.say("not yet", "source_max has to be above source_min", "reward.terms")
        return
    wrong, right = (
        at["target_min"] + (min(max(reward, low), low + width) - low) / width * (at["target_max"] - at["target_min"])
        for reward in (0.0, 1.0)
    )
    if environment_used(leaf.leaves) != "math" or right <= wrong:
        leaf.say("not yet", "--reward NAME=WEIGHT scales rlctl's own rewards", "reward.terms")
        return
    if right - wrong != 1:
        leaf.set("reward.terms", [{"name": math_scorer(leaf.leaves), "weight": right - wrong}])
    if wrong:
        leaf.set("reward.shift", wrong)
    leaf.say("mapped", f"the reward has the weight {right - wrong:g} (reward.terms) and the shift {wrong:g} "
                        "(reward.shift); reward_mean is without the shift")  # fmt: skip


def reward_shaping(leaf: Leaf) -> None:
    """Map DAPO's penalty with the same start and slope. NeMo-RL: min(0, -(tokens - start) / buffer x penalty) with
    start = max_response_length - buffer; rlctl's buffer ends at generation.max_new_tokens."""
    section = "grpo.reward_shaping"
    buffer, longest = leaf.get(f"{section}.overlong_buffer_length"), leaf.get(f"{section}.max_response_length")
    if (factor := leaf.get(f"{section}.stop_properly_penalty_coef")) is not None:
        leaf.map("reward.truncated_factor", factor)
    elif not buffer or not longest:
        leaf.say("not yet", "it needs overlong_buffer_length and max_response_length", "reward.overlong_buffer")
    else:
        start, limit = longest - buffer, completion_limit(leaf) or 0
        penalty = leaf.leaves.get(f"{section}.overlong_buffer_penalty", 1) * (limit - start) / buffer
        if 0 < start < limit:
            leaf.set("reward.overlong_buffer", (limit - start) / limit)
            leaf.set("reward.overlong_factor", penalty)
        leaf.say("mapped", "reward.overlong_buffer and reward.overlong_factor, for generation.max_new_tokens")


def completion_limit(leaf: Leaf) -> Any:
    """Return the most tokens of a completion: a prompt needs at least one of all tokens of a rollout."""
    length, new = leaf.get("policy.max_total_sequence_length"), leaf.get("policy.generation.max_new_tokens")
    return min(length - 1, new) if isinstance(length, int) and isinstance(new, int) and length > 1 else new


def completion_length(leaf: Leaf) -> None:
    """Map the completion length within the total length."""
    limit = completion_limit(leaf)
    if limit == leaf.value:
        leaf.map("generation.max_new_tokens", limit)
    else:
        leaf.set("generation.max_new_tokens", limit)
        end = f"a rollout ends at {limit + 1} tokens, its prompt among them"
        leaf.say("mapped", f"generation.max_new_tokens: {limit}; {end}")


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

    settings = {subject(key) for key in result.values if key != "scheduler.min_lr"}
    # An optimizer of torch without a scheduler has a constant learning rate.
    if not megatron_on(leaves) and any(leaves.get(f"policy.optimizer.{name}") for name in ("name", "kwargs.lr")):
        settings.add("schedule")
    taken = [key for key in other.values if subject(key) not in settings and key not in result.values]
    for key in taken:
        result.set(key, other.values[key], other.source[key])
    sources = {other.source[key] for key in taken}
    for entry in other.entries:
        if entry.key not in sources and (entry.status == "mapped" or "optimizer.lr" in settings):
            entry = dataclasses.replace(entry, status="not applicable", note="the backend that trains has its own")
        result.entries.append(entry)


def disagreement(result: Import, other: Import, leaves: Mapping[str, Any]) -> str | None:
    """Return a line on contradictions between the two backends' blocks (`other`: the unused one)."""
    blocks = (MEGATRON, "policy") if megatron_on(leaves) else ("policy", MEGATRON)
    lines = [
        f"{key} is {result.values[key]} ({result.source[key]}), not {value} ({other.source[key]})"
        for key, value in other.values.items()
        if not key.startswith("scheduler.") and result.values.get(key, value) != value
    ]
    schedules = [_schedule(imported.values, result.values.get("run.steps")) for imported in (result, other)]
    # A block without a schedule has a constant learning rate.
    if other.values.keys() & {"optimizer.lr", "scheduler.warmup_steps"} and schedules[0] != schedules[1]:
        lines.append(f"{blocks[0]}.scheduler sets the schedule, not {blocks[1]}.scheduler")
    backend = "Megatron" if megatron_on(leaves) else "DTensor"
    return f"{backend} trains, and its own block of the recipe holds: {'; '.join(lines)}" if lines else None


def _schedule(values: Mapping[str, Any], steps: Any) -> tuple[Any, ...]:
    warmup, decay = values.get("scheduler.warmup_steps", 0), values.get("scheduler.decay", "constant")
    rises = values.get("scheduler.init_lr", 0) if warmup else None
    falls = (values.get("scheduler.decay_steps", steps), values.get("scheduler.min_lr", 0))
    return warmup, rises, decay, falls if decay != "constant" else None


def learning_rate(leaf: Leaf) -> tuple[str, Any]:
    """Return the learning rate that holds, from the block of either backend, and its key."""
    preferred, other = (f"{MEGATRON}.optimizer.lr", "policy.optimizer.kwargs.lr")[
        :: 1 if megatron_on(leaf.leaves) else -1
    ]
    key = other if leaf.get(preferred) is None and leaf.get(other) is not None else preferred
    return key, leaf.get(key)


MUONS = ("muon", "dist_muon")
"""Megatron's names of Muon; the second has its states sharded."""


def optimizer(leaf: Leaf) -> None:
    """Map the optimizer's name. Of Muon's fields, those that a recipe leaves out have Megatron's defaults."""
    if leaf.value not in MUONS:
        only("adam", reason="the optimizer is AdamW or Muon", settled_by="optimizer.optimizer")(leaf)
        return
    leaf.map("optimizer.optimizer", "muon")
    block = f"{MEGATRON}.optimizer.muon_"
    for key, names, usual in (
        ("optimizer.muon_nesterov", ("use_nesterov", "nesterov"), False),
        ("optimizer.muon_scale", ("extra_scale_factor",), 1.0),
    ):
        if all(leaf.get(block + name) is None for name in names):
            leaf.set(key, usual)


def of_muon(rule: Rule) -> Rule:
    """Return the rule of a field that Megatron reads with Muon alone."""
    return when(lambda leaf: leaf.get(f"{MEGATRON}.optimizer.optimizer") in MUONS, rule, "read with Muon alone")


def states_on_host(leaf: Leaf) -> None:
    """Keep all optimizer states in host memory, where a recipe may name a fraction; none with a fraction of 0."""
    on = leaf.get(f"{MEGATRON}.optimizer.optimizer_offload_fraction") != 0
    to("training.optimizer_offload", {True: on, False: False})(leaf)


def dtensor_adapters(leaf: Leaf) -> None:
    """Map the rank of adapters and the layers that have them: named ones, or all but excluded ones."""
    targets, excluded = (leaf.get(f"{DTENSOR}.lora_cfg.{key}") for key in ("target_modules", "exclude_modules"))
    if targets:
        leaf.map_all({"training.lora.rank": leaf.value, "training.lora.targets": targets})
    elif leaf.get(f"{DTENSOR}.lora_cfg.match_all_linear") is False and not excluded:
        leaf.say("not yet", "neither match_all_linear nor names: no layers have adapters", "training.lora.rank")
    else:
        leaf.map("training.lora.rank", leaf.value)


def first_adapters(leaf: Leaf) -> None:
    """Start from a directory of PEFT. NeMo-RL's reference policy has these adapters too."""
    penalties = ("loss_fn.reference_policy_kl_penalty", "dpo.reference_policy_kl_penalty")
    if leaf.value is not None and any(map(leaf.get, penalties)):
        but = "the reference policy is the base without these adapters"
        leaf.map_all({"training.lora.adapter": leaf.value}, but)
    else:
        leaf.map("training.lora.adapter", leaf.value)


def adapter_dropout(leaf: Leaf) -> None:
    if of_texts(leaf.result):
        leaf.map("training.lora.dropout", leaf.value)
    else:
        only(0, None, reason="log-probs under dropout are not the sampling policy's")(leaf)


def dropout_position(leaf: Leaf) -> None:
    if leaf.get(leaf.name.removesuffix("_position")):
        differs("pre", reason="dropout acts on the input of A")(leaf)
    else:
        leaf.skip("dropout is off")


def sharded_states_on_host(leaf: Leaf) -> None:
    """Keep the optimizer's states in host memory, where a recipe keeps the weights there too."""
    if leaf.value is True:
        but = "the optimizer's states alone are in host memory, no weights"
        leaf.map_all({"training.optimizer_offload": True}, but)
    else:
        to("training.optimizer_offload", {False: False})(leaf)


def engine(leaf: Leaf) -> None:
    names = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "megatron": "Megatron's own engine", "dynamo": "Dynamo"}
    if leaf.value in names:
        leaf.say("changed", f"the recipe generates with {names[leaf.value]}, and rlctl with vLLM")
    else:
        only("vllm", None, reason="rlctl generates with vLLM", settled_by="generation.backend")(leaf)


def prediction_heads(leaf: Leaf) -> None:
    """Leave out multi-token-prediction training, which does not change the policy if its loss has no gradient in the
    layers below."""
    detached = leaf.get(f"{MEGATRON}.mtp_detach_heads") or leaf.get(f"{MEGATRON}.mtp_loss_scaling_factor") == 0
    reason = "multi-token prediction is not trained"
    rule = (
        differs(None, 0, reason=f"{reason}; the policy does not depend on it")
        if detached
        else only(None, 0, reason=reason)
    )
    rule(leaf)


def drafting(leaf: Leaf) -> None:
    """Map speculative decoding. A draft with weights is left out, or refused on the command line, because engines get
    only the policy's weights."""
    section = "policy.generation.vllm_kwargs.speculative_config"
    reason = "the draft needs weights, and engines get only the policy's"
    if leaf.get(f"{section}.num_speculative_tokens") == 0:
        leaf.skip("0 speculative tokens turn speculative decoding off")
    elif leaf.get(f"{section}.method") in ("ngram", "ngram_gpu", "suffix"):
        passes()(leaf)
    elif leaf.name in leaf.result.overridden:
        leaf.say("not yet", f"{reason}: methods without weights are ngram, ngram_gpu and suffix")
    else:
        leaf.say("changed", f"{reason}; tokens are sampled without drafts, from the same distribution")


def engine_precision(leaf: Leaf) -> None:
    """Map float8 in the engines: weights in blocks of 128 x 128, or in MX blocks, quantized at each refit."""
    if leaf.value == "fp8":
        method = "mxfp8" if leaf.get(f"{VLLM}.is_mx") is True else "fp8_per_block"
        leaf.map("vllm.quantization", method)
    else:
        only(None, "bfloat16", "float32", "float16", reason="engines hold the weights in model.dtype, or in fp8")(leaf)


def without_begin(leaf: Leaf) -> bool:
    """Return whether the recipe's chat template omits the tokenizer's first token."""
    template = str(leaf.get("policy.tokenizer.chat_template") or "")
    kept = leaf.result.values.get("model.images") is True  # the processor's template
    return "{" in template and "bos_token" not in template and not kept


def longest_text(leaf: Leaf) -> None:
    """Map maximum lengths. Texts may exceed the published length, which NeMo-RL never checks; engines refuse such
    rollouts there too."""
    if leaf.value and of_texts(leaf.result):
        leaf.map_all({"model.max_length": leaf.value, "model.extend_positions": True})
    else:
        leaf.map("model.max_length", leaf.value)


def rope_scaling(leaf: Leaf) -> None:
    """Map a key of the rotary embedding, by its name in a config.json."""
    leaf.map(f"model.rope_scaling.{leaf.name.rpartition('.')[2]}", leaf.value)


def template_variables(leaf: Leaf) -> None:
    leaf.map(f"model.chat_template_kwargs.{leaf.name.rpartition('.')[2]}", leaf.value)


MATH_SCORERS = {"hf_math_verify": "math-verify", "dapo_math_verify": "dapo-math"}
"""NeMo-RL's ways to compare answers, and rlctl's rewards."""


def math_scorer(leaves: Mapping[str, Any]) -> str:
    """Return the reward that compares answers as the recipe's environment `math` does."""
    return MATH_SCORERS.get(str(leaves.get("env.math.math_verify_impl")), "math-verify")


def steps_of_run(leaf: Leaf) -> None:
    if leaf.value == -1:
        leaf.skip("max_num_epochs says how long the run is")
    else:
        leaf.map("run.steps", leaf.value)


def epochs(leaf: Leaf) -> None:
    """Map the length of a recipe without a step count; with one, note that epochs may end it before `run.steps`."""
    steps = leaf.get("max_num_steps", *STEPS)
    if leaf.value is not None and isinstance(steps, int) and steps < 0:
        leaf.map("run.epochs", leaf.value)
        return
    # An epoch has at least one step.
    if leaf.value is None or (isinstance(steps, int) and 0 < steps <= leaf.value):
        leaf.skip("run.steps ends the run; prompts come round again")
        return
    prompts = leaf.get("num_prompts_per_step", *STEPS) or "batch.prompts"
    enough = f"{short(leaf.value)} x rows of the data / {short(prompts)} prompts of a step"
    leaf.say("changed", f"run.steps alone ends a run, and epochs do not: set it to {enough}, if that is less")


def recompute(leaf: Leaf) -> None:
    """Map whether activations are computed again: in whole layers, or in the parts that are named."""
    if leaf.value is not True and granularity_holds(leaf):
        leaf.skip("recompute_granularity says what is computed again")
    else:
        granularity = leaf.get(f"{MEGATRON}.recompute_granularity") or "full"
        to("training.recompute", {True: granularity, False: "none", None: None})(leaf)


def granularity_holds(leaf: Leaf) -> bool:
    """Return whether named recomputation applies. NeMo-RL reads it with activation_checkpointing; an override, or a
    recipe without that switch, also counts."""
    switch, name = f"{MEGATRON}.activation_checkpointing", f"{MEGATRON}.recompute_granularity"
    overridden = leaf.result.overridden
    return bool(leaf.get(name)) and (leaf.get(switch) is None or (name in overridden and switch not in overridden))


def adapted_layers(leaf: Leaf) -> None:
    """Map layers to groups of layers, or else Megatron's names; an empty list means all."""
    layers = leaf.value or [*ADAPTED]
    if not isinstance(layers, list):
        leaf.say("not yet", "it is no list of names", "training.lora.targets")
        return
    groups = sorted({ADAPTED[layer] for layer in layers if layer in ADAPTED})
    whole = set(layers) == {layer for layer, group in ADAPTED.items() if group in groups}
    leaf.map("training.lora.targets", groups if whole else layers)


def handed_on(key: str) -> str:
    """Return the key of rlctl's section that hands a key of `HANDED_ON` on."""
    prefix = next(prefix for prefix in HANDED_ON if key.startswith(f"{prefix}."))
    return f"{HANDED_ON[prefix]}.{key.removeprefix(prefix).lstrip('.')}"


def is_field(key: str) -> bool:
    """Return whether the installed Megatron-Core or vLLM has the field that a key is handed on as."""
    return any(key.startswith(f"{prefix}.") for prefix in HANDED_ON) and installed_field(handed_on(key)) is not None


def passes(otherwise: Rule | None = None) -> Rule:
    """Return the rule that passes the key on; `otherwise` if the installed version lacks it (None: unknown key)."""
    return lambda leaf: hand_on(leaf, handed_on(leaf.name), otherwise)


def batches(leaf: Leaf) -> None:
    """Map `train_global_batch_size`, the rollouts of an optimizer step."""
    rollouts, size = step_rollouts(leaf), leaf.value
    if of_texts(leaf.result):
        leaf.map("batch.prompts", size)
        return
    if rollouts % size:
        leaf.say("not yet", f"it does not divide the {rollouts} rollouts of a step", "batch.optimizer_steps")
        return
    leaf.set("batch.optimizer_steps", rollouts // size)
    leaf.say("mapped", f"batch.optimizer_steps: {rollouts // size} of {rollouts} rollouts")


def correction(leaf: Leaf) -> None:
    """Map the importance weights between engine and trainer: truncated (tis), or dropped outside of bounds (icepop)."""
    ratio = "loss_fn.truncated_importance_sampling"
    cap, least = leaf.get(f"{ratio}_ratio"), leaf.get(f"{ratio}_ratio_min")
    kind = leaf.get(f"{ratio}_type") or "tis"
    if not leaf.value and (leaf.get("grpo.async_grpo.enabled") or leaf.get("async_rl.sampler.name")):
        values = {"loss.importance_correction": "off", "rollouts.uncorrected": True}
        leaf.map_all(
            values, "rollouts of older weights are trained on as if the policy had sampled them, as the recipe has it"
        )
    elif not leaf.value:
        leaf.map("loss.importance_correction", "off")
    elif cap is None:
        leaf.map_all({"loss.importance_cap": NO_CAP, "loss.importance_correction": "truncated"})
    elif kind == "seq-mask-tis" and least is not None:
        leaf.map_all({"loss.sequence_mask": [least, cap], "loss.importance_correction": "untruncated"})
    elif kind == "tis":
        floor = {"loss.importance_floor": least} if least else {}
        leaf.map_all({"loss.importance_cap": cap, **floor, "loss.importance_correction": "truncated"})
    elif kind == "icepop" and least is not None:
        bounds = {"loss.importance_cap": cap, "loss.importance_floor": least}
        leaf.map_all({**bounds, "loss.importance_correction": "masked"})
    else:
        leaf.say("not yet", f"{kind}, {least} to {cap}, is not known", "loss.importance_correction")


def positive_nll(leaf: Leaf) -> None:
    """Map the weight of right answers' likelihood, which NeMo-RL computes only in PPO; its GRPO batches have no
    rewards."""
    if not leaf.value:
        leaf.skip("there is none")
    elif leaf.result.values.get("run.algorithm") == "ppo":
        leaf.map("loss.positive_nll_weight", leaf.value)
    else:
        leaf.skip("NeMo-RL has it in PPO alone")


def error_mask(leaf: Leaf) -> None:
    if leaf.value is None:
        leaf.map("loss.error_mask", None)
    else:
        reason = "a rollout beyond it is not learned from, and still counts in the average of the loss"
        leaf.map_all({"loss.error_mask": leaf.value}, reason)


def on_policy_ratio(leaf: Leaf) -> None:
    """A batch of one optimizer step has ratio 1 anyway."""
    if leaf.value and leaf.get("policy.train_global_batch_size") != step_rollouts(leaf):
        leaf.say("not yet", "the ratio is 1 in the first optimizer step of a batch, and there are several")
    else:
        leaf.skip("what rlctl does")


def decay_steps(leaf: Leaf) -> None:
    style = leaf.leaves.get(f"{MEGATRON}.scheduler.lr_decay_style", "constant")
    if style == "constant" or leaf.value in (None, leaf.get("max_num_steps", *STEPS)):
        leaf.skip("the learning rate decays over run.steps, if at all")
    else:
        leaf.map("scheduler.decay_steps", leaf.value)


def weight_decay_ends(leaf: Leaf) -> None:
    ends = [leaf.get(f"{MEGATRON}.scheduler.{end}_weight_decay") for end in ("start", "end")]
    if None in ends or ends == 2 * [leaf.get(f"{MEGATRON}.optimizer.weight_decay")]:
        leaf.skip("optimizer.weight_decay")
    else:
        leaf.map(f"scheduler.{leaf.name.rpartition('.')[2]}", leaf.value)


def betas(leaf: Leaf) -> None:
    beta1, beta2 = leaf.value
    leaf.map_all({"optimizer.beta1": beta1, "optimizer.beta2": beta2})


AHEAD = "each step of the warm-up has the learning rate that the next one has in NeMo-RL, whose first has the lowest"
"""NeMo-RL's schedules start one step later: Megatron and torch count finished steps, rlctl the current one."""


def warm_up(leaf: Leaf) -> None:
    begins = leaf.get(f"{leaf.name.rpartition('.')[0]}.lr_warmup_init") or 0
    if not leaf.value or begins == learning_rate(leaf)[1]:
        leaf.map("scheduler.warmup_steps", leaf.value)
    else:
        leaf.map_all({"scheduler.warmup_steps": leaf.value}, AHEAD)


TORCH_ARGUMENTS = {
    "LinearLR": {"start_factor", "end_factor", "total_iters"},
    "ConstantLR": {"factor", "total_iters"},
    "CosineAnnealingLR": {"T_max", "eta_min"},
}
"""Schedulers of torch that rlctl knows, and their arguments."""


def torch_schedulers(leaf: Leaf) -> None:
    """Map torch's schedulers: linear warm-up, then constant, linear or cosine. `milestones` are SequentialLR's switch
    steps."""
    if leaf.value is None:
        leaf.skip("the learning rate is constant")
        return
    milestones = next((step["milestones"] for step in leaf.value if step.get("milestones")), None)
    steps = [(str(step["name"]).rpartition(".")[2], step.get("kwargs") or {}) for step in leaf.value if "name" in step]
    unknown = [key for name, options in steps for key in set(options) - TORCH_ARGUMENTS.get(name, set(options))]
    warmup = steps.pop(0)[1] if steps and steps[0][0] == "LinearLR" and steps[0][1].get("end_factor", 1) == 1 else None
    kind, options = steps[0] if steps else ("ConstantLR", {"factor": 1})
    name, rate = learning_rate(leaf)
    # What a scheduler's arguments leave out is torch's default.
    supported = kind == "CosineAnnealingLR" or (kind == "ConstantLR" and options.get("factor", 1 / 3) == 1)
    supported = supported or (kind == "LinearLR" and options.get("start_factor", 1 / 3) == 1)
    warmup_steps = 0 if warmup is None else warmup.get("total_iters", 5)
    next_at = milestones[0] if warmup is not None and steps and milestones else warmup_steps
    if not isinstance(rate, int | float):
        leaf.say("not yet", f"{name} is {short(repr(rate))}, which is not a number")
    elif unknown:
        leaf.say("not yet", f"rlctl knows no argument {', '.join(unknown)} of torch's schedulers", "scheduler.decay")
    elif len(steps) > 1 or not supported:
        leaf.say("not yet", "rlctl knows a linear warm-up, then a constant rate, a line or a cosine", "scheduler.decay")
    elif next_at < warmup_steps or (next_at > warmup_steps and kind != "ConstantLR"):
        reason = f"the warm-up takes {warmup_steps} steps (total_iters), and milestones goes on after {next_at}"
        leaf.say("not yet", f"{reason}: give both the same number", "scheduler.warmup_steps")
    else:
        begins = rate if warmup is None else float(f"{warmup.get('start_factor', 1 / 3) * rate:.12g}")
        leaf.set("scheduler.warmup_steps", warmup_steps)
        leaf.set("scheduler.init_lr", 0 if warmup is None else begins)
        if kind == "CosineAnnealingLR":
            leaf.set("scheduler.decay", "cosine")
            leaf.set("scheduler.min_lr", options.get("eta_min", 0))
            leaf.set("scheduler.decay_steps", warmup_steps + options.get("T_max", 1))
        elif kind == "LinearLR":
            leaf.set("scheduler.decay", "linear")
            leaf.set("scheduler.min_lr", rate * options.get("end_factor", 1))
            leaf.set("scheduler.decay_steps", warmup_steps + options.get("total_iters", 5))
        note = f"scheduler: {warmup_steps} steps of warm-up, then {kind}"
        leaf.say(*(("mapped", note) if begins == rate else ("changed", f"{note}; {AHEAD}")))


def expert_engines(leaf: Leaf) -> None:
    """Map the ranks that share an engine's experts: more than its tensors have where it has replicas."""
    if leaf.value is None:
        leaf.map("generation.ep", None)
    else:
        leaf.map_all({"generation.ep": leaf.value, "generation.dp": engine_copies(leaf)})


def engine_copies(leaf: Leaf) -> int:
    ep, tp = (leaf.get(f"{VLLM}.{kind}_parallel_size") or 1 for kind in ("expert", "tensor"))
    return max(1, ep // tp)


DATA = ("data.train.", "data.default.", "data.")
"""Places of training data in a recipe: `data.train`, the datasets' defaults, or `data` in older recipes."""
VALIDATION = ("data.validation.", "data.default.", "data.")


def responses(leaf: Leaf, path: str | None, places: Iterable[str]) -> tuple[str, str, str, None] | None:
    """Return name, fields and split of a ResponseDataset; None where the recipe has no path for it."""
    subset = leaf.get("subset", *places)
    name = f"{path}:{subset}" if subset else str(path)
    prompt, answer = leaf.get("input_key", *places) or "input", leaf.get("output_key", *places) or "output"
    return (name, prompt, answer, None) if path else None


def validation_set(leaf: Leaf) -> tuple[str, str | None, str | None, str | None] | None:
    """Return name, fields and default split of validation rows; None if rlctl cannot read them, such as a split of
    training data."""
    if environment_used(leaf.leaves) == PUZZLE:
        return None
    path = leaf.get("data.validation.data_path") or leaf.get("data.val_data_path")
    name = leaf.get("data.validation.dataset_name")
    if name is None and path:
        name = leaf.get("data.default.dataset_name") or BY_PATH[0]
    return named_data(leaf, name, path, VALIDATION)


PLAIN = "arrow_text"
"""The data set of plain texts."""
BY_PATH = ("ResponseDataset", "BinaryPreferenceDataset", "PreferenceDataset", "openai_format")
"""NeMo-RL's classes of data sets that are files, or are on the hub."""


def data_sets(leaf: Leaf) -> Mapping[str, tuple[str, str | None, str | None, str | None]]:
    """Return the data sets of the recipe's algorithm that rlctl knows."""
    algorithm = str(leaf.result.values.get("run.algorithm"))
    return PAIR_DATASETS if algorithm in OF_PAIRS else {"sft": TEXT_DATASETS}.get(algorithm, DATASETS)


def named_data(
    leaf: Leaf, name: Any, path: str | None, places: Iterable[str]
) -> tuple[str, str | None, str | None, str | None] | None:
    """Return name, fields and default split of a data set; None where rlctl does not know it."""
    if name == PLAIN:
        return data_files(leaf)
    if name == GYM_DATA:
        return (path, None, None, None) if path else None
    if name in CLEVR:
        part = CLEVR_PARTS.get(str(leaf.get("split", *places) or "train"))
        return (part, "problem", "solution", "train") if part else None
    if name == MMPR:
        folder = leaf.get("download_dir", *places)
        fields = ("extra_info.question", "reward_model.ground_truth", None)
        return (f"{folder}/mmpr_tiny.parquet", *fields) if folder else None
    if name not in BY_PATH:
        return {**data_sets(leaf), **IMAGE_DATASETS}.get(str(name))
    algorithm = leaf.result.values.get("run.algorithm")
    if name == "openai_format":  # rlctl reads conversations and tools by these names alone
        usual = {"chat_key": "messages", "tool_key": "tools", "system_key": None}
        plain = all(leaf.get(key, *places) in (None, value) for key, value in usual.items())
        return (path, None, None, None) if path and plain and algorithm == "sft" else None
    if algorithm not in OF_PAIRS:
        return responses(leaf, path, places) if name == BY_PATH[0] else None
    return pairs_of_path(leaf, path, places, "context" if name == "PreferenceDataset" else "prompt")


def validated(rule: Rule) -> Rule:
    """Return the rule of a key of validation, for recipes whose validation prompts can be read."""
    reason = "the recipe names no prompts of validation that rlctl can read: set validation.every with "
    return when(
        lambda leaf: validation_set(leaf) or holds_out(leaf),
        rule,
        logs(f"{reason}validation.data.name or validation.holdout"),
    )


def holds_out(leaf: Leaf) -> bool:
    """Return whether a recipe validates on a number of its plain texts."""
    size, plain = leaf.get("split_validation_size", *DATA), leaf.get("dataset_name", *DATA) == PLAIN
    return plain and isinstance(size, int) and size > 0


def validation_period(leaf: Leaf) -> None:
    """Map the validation interval and data; NeMo-RL samples as in training."""
    values = dict(zip(("name", "prompt_field", "answer_field", "split"), validation_set(leaf) or (), strict=False))
    if leaf.get("data.validation.dataset_name") not in CLEVR:  # whose splits are separate data sets
        values["split"] = leaf.get("data.validation.split") or values.get("split")
    for key, value in values.items():
        if value is not None:
            leaf.set(f"validation.data.{key}", value)
    if not of_texts(leaf.result):
        temperature = leaf.get("policy.generation.val_temperature")
        leaf.set(
            "validation.temperature",
            leaf.get("policy.generation.temperature") or 1.0 if temperature is None else temperature,
        )
    # NeMo-RL validates periodically where the number is above 0, and recipes write -1 as well as 0.
    leaf.map("validation.every", leaf.value and max(0, leaf.value))


def validation_batches(leaf: Leaf) -> None:
    """Map the number of validation batches of texts; 0 or less means all."""
    section = leaf.name.partition(".")[0]
    size = leaf.get(f"{section}.val_global_batch_size") or 1
    leaf.map("validation.max_prompts", leaf.value * size if leaf.value > 0 else 2**31 - 1)


def dataset(leaf: Leaf) -> None:
    if leaf.value != leaf.get("dataset_name", *DATA):
        leaf.skip("data.train has its own")
        return
    path = leaf.get("data_path", *DATA) or leaf.get("train_data_path", *DATA)
    if leaf.value == GYM_DATA and not path:
        leaf.say("changed", "the recipe leaves it to the command line where the rows are: name them with --data")
        return
    if (source := named_data(leaf, leaf.value, path, DATA)) is None:
        by_path = BY_PATH[1:3] if leaf.result.values.get("run.algorithm") in OF_PAIRS else BY_PATH[::3]
        names = f"{', '.join((*data_sets(leaf), *ALL_IMAGE_DATA))}, and {' and '.join(by_path)} with a data_path"
        names = f"rlctl knows {names}; --data names another"
        leaf.say("not yet", names, "data.name")
        return
    name, prompt, answer, split = source
    answer = answer and (leaf.get("output_key", *DATA) or answer)
    fields = {key: field for key, field in {"prompt_field": prompt, "answer_field": answer}.items() if field}
    for key, value in {"name": name, **fields}.items():
        leaf.set(f"data.{key}", value)
    if split and (leaf.value in CLEVR or leaf.get("split", *DATA) is None):
        leaf.set("data.split", split)
    if leaf.value in CLEVR:
        leaf.set("data.answer_pattern", IN_ANSWER_TAGS)
    if leaf.value == REFCOCO:
        leaf.set("data.image_folder", leaf.get("download_dir", *DATA) or "coco_images")
        reason = (
            "pictures keep their shape, where NeMo-RL makes squares of 256 x 256; a row keeps its caption in all epochs"
        )
        leaf.say("changed", f"data.name: {name}; {reason}")
        return
    leaf.say("mapped", f"data.name: {name}" + (f", fields {' and '.join(fields.values())}" if fields else ""))


def split(leaf: Leaf) -> None:
    """Map the split, except for data whose splits are separate data sets."""
    when(lambda leaf: leaf.get("dataset_name", *DATA) not in CLEVR, to("data.split"), "read with dataset_name")(leaf)


def pairs_of_path(
    leaf: Leaf, path: str | None, places: Iterable[str], prompt: str
) -> tuple[str, str, None, None] | None:
    """Return name and prompt field (default `prompt`) of preferences; None without a path or with other completion
    names."""
    subset = leaf.get("subset", *places)
    usual_keys = all(leaf.get(f"{name}_key", *places) in (None, name) for name in ("chosen", "rejected"))
    prompt = leaf.get("prompt_key", *places) or prompt
    return (f"{path}:{subset}" if subset else path, prompt, None, None) if path and usual_keys else None


def folders_of(leaf: Leaf) -> tuple[Path, ...]:
    """Return the folders that a path of the recipe may be relative to: the current one, and its files' folders and
    parents."""
    return (Path(), *dict.fromkeys(folder for file in leaf.result.files for folder in file.parents))


def text_file(leaf: Leaf, key: str) -> str | None:
    """Return a prompt file's text, relative to NeMo-RL's start directory; None, with the reason recorded, if missing.
    `key` replaces the file."""
    if leaf.name.startswith("data.default.") and leaf.name.replace("default", "train", 1) in leaf.leaves:
        leaf.skip("data.train has its own")
        return None
    if leaf.value is None:
        leaf.skip("there is none")
        return None
    for path in (folder / str(leaf.value) for folder in folders_of(leaf)):
        if os.path.isfile(path):
            return read_text(path, leaf.name)
    leaf.say("not yet", f"there is no such file here or above the recipe: put it there, or set {key}", key)
    return None


def prompt_file(leaf: Leaf) -> None:
    """Map a prompt template, which Python's `format` fills in: `{}` is the question and a brace is written twice."""
    if (text := text_file(leaf, "data.prompt_template")) is None:
        return
    parts = re.split(r"(?<!\{)\{\}(?!\})", text.strip("\n"))
    if len(parts) != 2:
        leaf.say("not yet", "a template has one {}, where the question stands", "data.prompt_template")
        return
    texts = [part.replace("{{", "{").replace("}}", "}") for part in parts]
    # Such braces would name a column in rlctl's template: Jinja can say that they are text.
    if any(re.search(r"\{\w+\}|\{\{|\{%", text) for text in texts):
        leaf.map("data.prompt_template", "{{ prompt }}".join(f"{{% raw %}}{text}{{% endraw %}}" for text in texts))
    else:
        leaf.map("data.prompt_template", "{prompt}".join(texts))


def system_prompt_file(leaf: Leaf) -> None:
    if (text := text_file(leaf, "data.system_prompt")) is not None:
        leaf.map("data.system_prompt", text)


PUZZLE = "sliding_puzzle_game"
"""The puzzle's section, whose script makes the prompts."""


def environment_used(leaves: Mapping[str, Any]) -> str | None:
    """Return the scoring environment: the puzzle, else the data's, else one other than math, else math (also for
    section `dapo`)."""
    if any(key.startswith(f"env.{PUZZLE}.") for key in leaves):
        return PUZZLE
    if leaves.get("env.should_use_nemo_gym") is True:
        return GYM
    environment = next(
        (leaves[f"{place}env_name"] for place in DATA if leaves.get(f"{place}env_name") is not None), None
    )
    present = dict.fromkeys(key.split(".")[1] for key in leaves if key.startswith("env.") and key.count(".") > 1)
    return environment or next((name for name in present if name not in ("math", "dapo")), "math" if present else None)


def environment(leaf: Leaf) -> None:
    """Say once that an environment is not there yet; math is (`finish` sets the reward)."""
    name, used = leaf.name.split(".")[1], environment_used(leaf.leaves)
    if name != used:
        leaf.skip(f"the data's environment is {used}" if used else "there is no environment")
    elif leaf.name == f"env.{name}.reward_functions":
        reward_functions(leaf)
    elif f"env.{name}.reward_functions" in leaf.leaves:
        leaf.skip("rewards are computed in separate processes")
    elif any(entry.key.startswith(f"env.{name}.") and entry.status == "not yet" for entry in leaf.result.entries):
        leaf.skip(f"it belongs to the environment {name}")
    else:
        reason = f"the environment {name} is not there yet; --reward names rlctl's own rewards"
        leaf.say("not yet", reason, "reward.terms")


REWARD_FUNCTIONS = ("format", "exact_alnum", "math_expr", "bbox_giou", "geo3k")
"""Rewards of NeMo-RL's environments of images; rlctl's have the same names and arguments."""


def reward_functions(leaf: Leaf) -> None:
    """Map weighted rewards. NeMo-RL divides the weights by their sum."""
    total = sum(function["weight"] for function in leaf.value)
    unknown = [function["name"] for function in leaf.value if function["name"] not in REWARD_FUNCTIONS]
    if unknown or not total:
        reason = f"rlctl knows {', '.join(REWARD_FUNCTIONS)}, with weights whose sum is not 0"
        leaf.say("not yet", f"{reason}; --reward names another", "reward.terms")
        return
    terms = [
        {"name": function["name"], "weight": float(f"{function['weight'] / total:.12g}")}
        | ({"params": dict(function["kwargs"])} if function.get("kwargs") else {})
        for function in leaf.value
    ]
    leaf.map("reward.terms", terms)


def gym(leaf: Leaf) -> None:
    if environment_used(leaf.leaves) != GYM:
        environment(leaf)
    elif leaf.name.removeprefix(f"env.{GYM}.") in MARKS:
        marks(leaf)
    elif any(entry.key.startswith(f"env.{GYM}.") and entry.status == "changed" for entry in leaf.result.entries):
        leaf.skip("NeMo Gym is started with it")
    else:
        where = "its address is --set environment.params.head=http://HOST:PORT"
        leaf.say(
            "changed", f"start NeMo Gym with this section and vllm_model.yaml in place of the one for training; {where}"
        )


def of_turns(key: str) -> Rule:
    """Return the rule of the advantage of turns that have a fault, as the environment NeMo Gym finds them."""
    gym_alone = only(None, reason="NeMo-RL knows such turns in NeMo Gym alone")
    return when(lambda leaf: environment_used(leaf.leaves) == GYM, to(key), gym_alone)


MARKS = {
    "thinking_tags": ["<think>", "</think>"],
    "invalid_tool_call_patterns": ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"],
}
"""Texts that mark faulty turns in NeMo-RL: its defaults, which are also rlctl's."""


def marks(leaf: Leaf) -> None:
    """Accept only rlctl's marks of faulty turns."""
    mark = MARKS[leaf.name.rpartition(".")[2]]
    only(None, mark, reason=f"turns with a fault are known by {', '.join(mark)}")(leaf)


PENALTIES = {
    "penalize_duplicated_reasoning": "duplicated-thinking",
    "penalize_empty_final_answer": "empty-answer",
    "penalize_malformed_think_tag": "malformed-thinking",
}
"""NeMo-RL's switches, and rlctl's names of faults that take the reward of an episode of NeMo Gym."""


def penalty(leaf: Leaf) -> None:
    """Map what takes the reward of an episode."""
    name, unwanted = leaf.name.rpartition(".")[2], leaf.get("reward_penalties.token_ids.unwanted")
    if not leaf.value:
        leaf.skip("it is off")
    elif environment_used(leaf.leaves) != GYM:
        leaf.say("not yet", "NeMo-RL knows it in NeMo Gym alone", "environment.no_reward")
    elif name in PENALTIES:
        so_far = leaf.result.values.get("environment.no_reward", [])
        tags = "tags are looked for in texts, and not by their token ids" if name.endswith("think_tag") else None
        leaf.map_all({"environment.no_reward": [*so_far, PENALTIES[name]]}, tags)
    elif unwanted and name == "penalize_unwanted_tokens":
        leaf.map("environment.unwanted_tokens", [unwanted] if isinstance(unwanted, int) else unwanted)
    else:
        leaf.say("not yet", "it needs reward_penalties.token_ids.unwanted", "environment.unwanted_tokens")


def scored_by_model(leaf: Leaf) -> None:
    """Map a recipe's reward model, which scores in its published precision."""
    if environment_used(leaf.leaves) != "reward_model":
        environment(leaf)
    else:
        terms = [{"name": f"model:{leaf.value}"}]
        how = "it reads the prompt as the data has it, and is computed in float32 on processors"
        leaf.map_all({"reward.terms": terms}, how)


def of_reward_model(leaf: Leaf) -> None:
    if environment_used(leaf.leaves) == "reward_model":
        leaf.skip("scores do not depend on it: reward.terms names the reward model")
    else:
        environment(leaf)


def with_turns(rule: Rule, otherwise: Rule) -> Rule:
    """Return the rule of a key of turns, which `rule` maps where the recipe has an environment with turns."""
    return when(lambda leaf: environment_used(leaf.leaves) == PUZZLE, rule, otherwise)


def when_math(rule: Rule) -> Rule:
    return when(lambda leaf: environment_used(leaf.leaves) == "math", rule, environment)


def variables(key: str) -> Rule:
    """Return the rule of an environment variable of processes, which `key` (an open mapping) passes on."""

    def rule(leaf: Leaf) -> None:
        name = leaf.name.rpartition(".")[2]
        if name.startswith("NRL_"):
            leaf.skip("it is NeMo-RL's own")
        elif leaf.value is None:
            leaf.skip("unset")
        else:
            leaf.map(f"{key}.{name}", str(leaf.value))

    return rule


def dynamic_batching(leaf: Leaf) -> None:
    """Pad rows instead of packing them. NeMo-RL refuses both together; here packing wins."""
    if leaf.value is not True:
        leaf.skip("rows of training.micro_batch_tokens")
    elif leaf.get("policy.sequence_packing.enabled") is True:
        leaf.say("changed", "rows are packed; NeMo-RL refuses to start with policy.sequence_packing and this both on")
    else:
        leaf.map_all({"training.packing": False, "training.dynamic_batching": True})


def kept_checkpoints(leaf: Leaf) -> None:
    """Keep the newest checkpoints without a metric, else the best by mean reward (validation if every checkpoint has
    one)."""
    metric, highest = leaf.get("checkpointing.metric_name"), leaf.get("checkpointing.higher_is_better") is not False
    every, saves = leaf.get("val_period", *STEPS) or 0, leaf.get("checkpointing.save_period") or 0
    if leaf.get("checkpointing.enabled") is False:
        leaf.skip("checkpoints are off")
        return
    if leaf.value is None or metric is None:
        leaf.map("run.keep_last", leaf.value)
        return
    leaf.set("run.keep_best", leaf.value)
    kept = f"run.keep_best: {leaf.value}, by the mean reward of"
    at_each = validation_set(leaf) and every > 0 and saves % every == 0
    if at_each and highest and re.match("val(?!.*loss)", str(metric)):
        leaf.set("run.keep_best_by", "validation/reward_mean")
        leaf.say("mapped", f"{kept} validation, every {every} steps")
    else:
        theirs = str(metric) if highest else f"the lowest {metric}"
        leaf.say("changed", f"{kept} training instead of {theirs}; and the newest")


LOGGERS = {
    "logger.tensorboard_enabled": "tensorboard",
    "logger.wandb_enabled": "wandb",
    "logger.mlflow_enabled": "mlflow",
}
"""Switches of loggers, and rlctl's names of these."""


def loggers(leaf: Leaf) -> None:
    leaf.map("run.loggers", [name for key, name in LOGGERS.items() if leaf.get(key) is True])


def logged_as(key: str, logger: str) -> Rule:
    """Return the rule of a logger's run name; rlctl uses the first enabled logger's name for all."""

    def rule(leaf: Leaf) -> None:
        first = next((name for switch, name in LOGGERS.items() if name != "tensorboard" and leaf.get(switch)), None)
        if first == logger:
            leaf.map(key, leaf.value)
        else:
            other = f"all loggers use {key}, from {first}"
            leaf.say("logging", f"{logger} is off" if first is None else other)

    return rule


SAMPLERS = {
    "in_order": ("position", None),
    "weight_fifo": ("arrival", "groups that finished first come first, and old ones are waited for"),
    "ready_first": ("arrival", "groups that are as old as they may be are waited for"),
    "windowed": ("arrival", "only what can still be trained on is begun, and nothing is thrown away"),
}
"""Samplers of NeMo-RL's single controller: the `rollouts.order`, and the difference."""


def sampler(leaf: Leaf) -> None:
    """Map the single controller's batches and staleness. Its engines always continue under new weights."""
    name = leaf.get("async_rl.sampler.name") or "in_order"
    if name not in SAMPLERS:
        leaf.say("not yet", f"rlctl has rollouts.order, and knows {', '.join(SAMPLERS)}", "rollouts.order")
        return
    order, otherwise = SAMPLERS[name]
    knob = leaf.get(f"async_rl.sampler.{'max_lookahead' if name == 'in_order' else 'max_staleness'}_versions")
    lag = 1 if knob is None else knob
    if lag == 0:
        leaf.map("rollouts.mode", "sync")
        return
    ages = {"rollouts.mode": "async", "rollouts.max_staleness": lag, "refit.in_flight": "keep"}
    leaf.map_all({**ages, "rollouts.order": order}, otherwise)


def engine_devices(leaf: Leaf) -> None:
    """Map the devices that engines have to themselves, and the number of engines on them."""
    resources = "policy.generation.colocated.resources"
    if leaf.get("policy.generation.colocated.enabled") is not False:
        leaf.skip("policy and engines are on the same devices")
    elif leaf.name != f"{resources}.gpus_per_node" and leaf.get(f"{resources}.gpus_per_node") is not None:
        leaf.skip(f"read with {resources}.gpus_per_node")
    else:
        per_node = leaf.get(f"{resources}.gpus_per_node") or leaf.get("cluster.gpus_per_node") or 1
        devices = (leaf.get(f"{resources}.num_nodes") or 1) * per_node
        tp, pp = (leaf.get(f"{VLLM}.{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline"))
        engines = max(1, devices // (tp * pp * engine_copies(leaf)))
        leaf.map_all({"generation.engines": engines, "generation.devices": devices})


def checkpoints_on(leaf: Leaf) -> None:
    leaf.map("run.save_final", bool(leaf.value))
    if not leaf.value:
        leaf.set("run.checkpoint_every", 0)

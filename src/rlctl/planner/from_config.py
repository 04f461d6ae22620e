"""Reads cluster, workload and pins of a plan from the configuration."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rlctl.config.facts import PLANNED, UNDECIDED
from rlctl.config.parallel import ParallelSpec
from rlctl.config.schema import Schema
from rlctl.errors import ConfigError, MachineError
from rlctl.models.constraints import require_policy_sizes, unpacked_rule
from rlctl.models.facts import ModelFacts
from rlctl.models.quantized_base import packed_sizes
from rlctl.planner.choice import PLAIN_ENGINE, EngineNumbers, LoraChoice, Precision
from rlctl.planner.costs.adapters import lora_choice
from rlctl.planner.costs.parameters import count
from rlctl.planner.inputs.cluster import (
    ClusterFacts,
    calibrated,
    device_reported,
    load_profile,
    local_cpu,
    make_cluster,
    match_device,
    measured,
    with_profile,
)
from rlctl.planner.inputs.constants import DEFAULTS
from rlctl.planner.inputs.request import Request, TeacherWork, Workload
from rlctl.planner.lora_refit import choose_refit
from rlctl.planner.make_plan import Refusal, make_plan
from rlctl.planner.result import Plan
from rlctl.settings.config import EngineConfig, RlctlConfig, RolloutConfig
from rlctl.settings.other_models import owners_of
from rlctl.settings.training import TrainingConfig
from rlctl.transport.available import storing, transport_facts

DRIVER_LIMIT_S = 30.0
ONE_RANK = {"training.tp", "training.cp", "generation.tp", "generation.pp"}
"""Sizes that are 1 under `checks.exact`: sums over ranks have another order."""
PROMPT_TOKENS = 128
"""Prompt length that the planner assumes where the data is not read."""
IMAGE_TOKENS, IMAGE_SHARE = 384, 0.75
"""Assumed image tokens in a prompt of a vision model (Qwen2.5-VL reads 640 x 480 pixels as 391), beside the prompt's
text, and the assumed share of a text."""
SHORTEST_ROOM = 256
"""Prompt tokens that are always provided for, however short the prompts looked at are."""
TEXT_TOKENS = 2048
"""Longest text that it assumes there, where `model.max_length` is unset."""


def local_gpus() -> list[str]:
    """Return names of the local GPUs in `CUDA_VISIBLE_DEVICES`, from the driver; empty: none. Raises MachineError if
    the driver fails."""
    return [row[2] for row in _of_gpus("name")]


def gpu_memory() -> float | None:
    """Bytes of the smallest of these GPUs; None: the driver does not say, as where GPU and processor share memory."""
    sizes = [float(row[3]) * 1024**2 for row in _of_gpus("name,memory.total,driver_version") if row[3].isdigit()]
    return min(sizes, default=None)


def gpu_driver() -> str:
    """Version of these GPUs' driver; empty: there is none."""
    return next((row[3] for row in _of_gpus("name,driver_version")), "")


def gpu_capability() -> float | None:
    """Compute capability of the first of these GPUs; None: the driver does not say."""
    cell = next((row[3] for row in _of_gpus("name,compute_cap")), "")
    return float(cell) if re.fullmatch(r"\d+\.\d+", cell) else None


def mig_problem() -> str:
    """Return one sentence about GPUs that are split into MIG slices; empty: these GPUs are whole."""
    visible_ids = [visible_id.strip() for visible_id in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if slices := [visible_id for visible_id in visible_ids if visible_id.startswith("MIG-")]:
        return f"CUDA_VISIBLE_DEVICES names a MIG slice ({slices[0]}); rlctl runs on whole GPUs alone"
    split = [row[0] for row in _of_gpus("mig.mode.current") if row[2] == "Enabled"]
    return f"GPU {', '.join(split)} is split into MIG slices; rlctl runs on whole GPUs alone" if split else ""


WHOLE_GPUS = "Switch MIG off (`sudo nvidia-smi -mig 0`), or take a whole GPU; --gpu cpu computes without GPUs."


def require_whole_gpus() -> None:
    """Raise MachineError for GPUs that are split into MIG slices: their memory and number are not the GPU's."""
    if problem := mig_problem():
        raise MachineError(f"{problem}.", WHOLE_GPUS)


def _of_gpus(fields: str) -> list[tuple[str, ...]]:
    """Return (index, uuid, *fields) of each GPU that is left to this process."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu=index,uuid,{fields}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"nvidia-smi did not answer in {DRIVER_LIMIT_S:.0f} s: the GPUs' driver hangs.",
            "Restart the driver or the machine; --gpu cpu computes without GPUs.",
        ) from error
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    rows = [tuple(part.strip() for part in line.split(",")) for line in lines]
    rows = [row for row in rows if len(row) == 2 + len(fields.split(","))]
    return visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(rows: Sequence[tuple[str, ...]], visible_ids: str | None) -> list[tuple[str, ...]]:
    """Return `rows` (index, uuid, ...) named by `CUDA_VISIBLE_DEVICES` in its order. A name is an index or uuid prefix;
    the first unknown name ends the list. None: all."""
    selected: list[tuple[str, ...]] = []
    for name in (part.strip() for part in visible_ids.split(",")) if visible_ids is not None else ():
        fits = [row for row in rows if name == row[0] or (name.startswith("GPU-") and row[1].startswith(name))]
        if len(fits) != 1:
            break
        selected += fits
    return list(rows) if visible_ids is None else selected


def cluster_from_config(config: RlctlConfig, assume: str | None = None) -> ClusterFacts:
    """Return the configured cluster without its spare nodes. Raises as `_whole_cluster`, and ConfigError where all
    nodes are spare."""
    whole, spare = _whole_cluster(config, assume), config.cluster.spare_nodes
    if spare >= whole.nodes:
        raise ConfigError(
            f"cluster.spare_nodes = {spare} leaves none of the {whole.nodes} node(s) (cluster.nodes) to compute on.",
            "Set it lower, or give more with --nodes.",
        )
    return replace(whole, nodes=whole.nodes - spare)


def _whole_cluster(config: RlctlConfig, assume: str | None) -> ClusterFacts:
    """Return the configured cluster. `gpu: auto` is this machine; if it lacks requested GPUs, `assume` is the type
    (None: raise MachineError)."""
    section, count = config.cluster, config.cluster.gpus_per_node
    if section.gpu not in ("cpu", "auto") and count != 0:
        described = make_cluster(section.gpu, section.nodes, count)
        here = {match_device(name) for name in local_gpus()} if section.ray_address is None else set()
        if assume is None and section.ray_address is None:
            require_whole_gpus()
        # Where another kind is named, it is the nearest one to a GPU of this machine, or another machine's.
        return (
            measured(described, gpu_memory())
            if here and (assume is None or described.device.name in here)
            else described
        )
    if section.gpu == "auto" and count != 0:
        require_whole_gpus()
    local = local_gpus() if section.gpu == "auto" and count != 0 else []
    if local:
        memory = gpu_memory()
        is_listed = match_device(local[0]) is not None
        device = device_reported(local[0], memory, None if is_listed else gpu_capability())
        cluster = ClusterFacts(device, section.nodes or 1, count or len(local))
        return calibrated(with_profile(measured(cluster, memory), load_profile()))
    if section.gpu == "cpu" or count == 0 or (count, section.nodes) == (None, None):
        return calibrated(with_profile(ClusterFacts(local_cpu(), section.nodes or 1, 0), load_profile()))
    if assume is None:
        request = f"nodes = {section.nodes}" if count is None else f"gpus_per_node = {count}"
        raise MachineError(
            f"cluster.{request} asks for GPUs, and this machine has none.",
            "Use `--preset laptop` or `--gpu cpu` here; `rlctl plan --gpu h100` plans for another machine.",
        )
    return make_cluster(assume, section.nodes, count)


def completions_workload(config: RolloutConfig, facts: ModelFacts, prompt_tokens: list[int], samples: int) -> Workload:
    """The workload of completing prompts of these lengths, `samples` times each. Nothing is trained."""
    new = config.new_tokens
    limit = min(config.model.max_length or facts.max_length, facts.max_length)
    return Workload(
        prompts=len(prompt_tokens),
        generations=samples,
        max_length=min(limit, max(prompt_tokens) + new),
        max_new_tokens=min(new, limit),
        mean_new_tokens=min(config.mean_new_tokens, new),
        prompt_tokens=round(sum(prompt_tokens) / len(prompt_tokens)),
        image_share=IMAGE_SHARE if facts.vision is not None else 0.0,
        trains=False,
        goal=config.run.goal,
    )


def room_for(facts: ModelFacts, longest_prompt: int, max_new_tokens: int) -> int:
    """Return `model.max_length` where nobody sets it: it leaves room for prompts twice as long as those seen."""
    return min(facts.max_length, max(SHORTEST_ROOM, 2 * longest_prompt) + max_new_tokens)


def assumed_prompt(facts: ModelFacts) -> int:
    """Return the tokens of a prompt where the data is not known."""
    return PROMPT_TOKENS + (IMAGE_TOKENS if facts.vision is not None else 0)


def text_workload(
    config: EngineConfig | RlctlConfig,
    facts: ModelFacts,
    tokens: int | None,
    *,
    needs: Collection[str],
    size: int = 1,
    valued: bool = False,
    teacher_top: int = 0,
) -> Workload:
    """Return the workload of training on texts. `tokens`: mean text length, None if unknown. `needs`: log-probs before
    training. `size`: texts per sequence group of a row. `valued`: scalar head. `teacher_top`: number of compared
    teacher tokens."""
    length = config.model.max_length or min(facts.max_length, TEXT_TOKENS)
    packs = not facts.unpacked
    return Workload(
        algorithm=config.run.algorithm,
        measured=tokens is not None,
        prompts=config.batch.prompts,
        generations=1,
        rollouts=False,
        answers=config.validation.answered,
        max_new_tokens=min(config.new_tokens or 1, length),
        mean_new_tokens=min(config.mean_new_tokens or 1, length),
        valued=valued,
        max_length=size * length,
        mean_tokens=float(size * (tokens or max(1, length // 2))),
        image_share=IMAGE_SHARE if facts.vision is not None else 0.0,
        optimizer_steps=config.batch.optimizer_steps,
        epochs=config.batch.epochs,
        old_logprobs="old_logprobs" in needs,
        reference="reference_logprobs" in needs,
        own_teacher=config.own_teacher is not None,
        teacher_average=config.own_teacher is not None and config.own_teacher.update_rate < 1,
        packing=config.training.packing and packs,
        dynamic=config.training.dynamic_batching or (config.training.packing and not packs),
        goal=config.run.goal,
        teacher_top=min(teacher_top, facts.vocab),
    )


def rollout_workload(
    config: RolloutConfig,
    facts: ModelFacts,
    prompt_tokens: int | None,
    *,
    needs: Collection[str],
    critic: bool = False,
    teacher_top: int = 0,
) -> Workload:
    """Return the workload of a step that samples and trains. `prompt_tokens`: mean prompt length, None if unknown.
    `needs`: log-probs before training. `critic`: with a value model. `teacher_top`: number of compared teacher
    tokens."""
    new = config.new_tokens
    length = config.model.max_length
    assumed = assumed_prompt(facts)
    prompt = prompt_tokens or assumed
    if prompt_tokens is None and length:  # what completions leave, or a quarter where these may fill it all
        prompt = min(assumed, length - new if length - new >= 16 else max(1, length // 4))
    length = length or room_for(facts, prompt, new)
    packs, most = not facts.unpacked, min(new, max(1, length - min(prompt, length)))
    return Workload(
        algorithm=config.run.algorithm,
        measured=prompt_tokens is not None,
        prompts=config.batch.prompts,
        generations=config.batch.generations,
        max_length=length,
        max_new_tokens=most,
        mean_new_tokens=min(config.mean_new_tokens, most),
        prompt_tokens=min(prompt, length),
        image_share=IMAGE_SHARE if facts.vision is not None else 0.0,
        optimizer_steps=config.batch.optimizer_steps,
        epochs=config.batch.epochs,
        old_logprobs="old_logprobs" in needs,
        reference="reference_logprobs" in needs,
        own_teacher=config.own_teacher is not None,
        teacher_average=config.own_teacher is not None and config.own_teacher.update_rate < 1,
        critic=critic,
        packing=config.training.packing and packs,
        dynamic=config.training.dynamic_batching or (config.training.packing and not packs),
        share_prompts=config.training.share_prompts and packs,
        goal=config.run.goal,
        teacher_top=min(teacher_top, facts.vocab),
        staleness=config.rollouts.max_staleness if config.rollouts.mode == "async" else None,
        in_flight=config.refit.in_flight,
        tools_s=max((environment.answers_s for environment in config.plays), default=0.0),
    )


def pins_from_config(config: RlctlConfig) -> dict[str, Any]:
    """Return the keys that the planner would decide and that the user, a preset or a file has set, or other keys
    imply."""
    keys = Schema((type(config),)).with_fact(PLANNED)
    values = {key: functools.reduce(getattr, key.split("."), config) for key in keys}
    implied = dict.fromkeys(ONE_RANK & values.keys(), 1) if config.checks.computes_exactly else {}
    return implied | {key: value for key, value in values.items() if value not in UNDECIDED}


def pinned_parallel(facts: ModelFacts, training: TrainingConfig) -> ParallelSpec:
    """Return the parallel sizes of `training`, 1 if unset. Raises ConfigError naming one that model or backend does not
    allow."""
    parallel = ParallelSpec(
        tp=training.tp or 1,
        pp=training.pp or 1,
        vpp=training.vpp or 1,
        cp=training.cp or 1,
        ep=training.ep or 1,
        etp=training.etp or 0,
        dp=training.dp or training.ep or 1,
        sequence_parallel=training.sequence_parallel,
        first_stage_layers=training.first_stage_layers,
        last_stage_layers=training.last_stage_layers,
        replicate=training.replicate or 1,
    )
    require_policy_sizes(facts, parallel, fsdp=training.backend == "dtensor")
    return parallel


def require_format(config: RlctlConfig, cluster: ClusterFacts) -> None:
    """Raise ConfigError where the device has no units for the number format."""
    if config.model.dtype in ("auto", "bfloat16") and not cluster.device.has_bfloat16:
        raise ConfigError(
            f"model.dtype = {config.model.dtype} is bfloat16 on GPUs, and {cluster.device.name.upper()} has no units "
            "for it.",
            "Add --set model.dtype=float16.",
        )


def precision_from_config(config: RlctlConfig, cluster: ClusterFacts) -> Precision | None:
    """Return the precision of linear layers: `fp8` with `megatron.fp8`, else model.dtype; None: the default. Raises
    ConfigError if float8 does not fit device, weights or adapters."""
    fp8, recipe = config.megatron.passed.get("fp8"), config.megatron.passed.get("fp8_recipe")
    if not fp8:
        by_dtype: dict[str, Precision] = {"float32": "float32", "bfloat16": "bf16", "float16": "bf16"}
        return by_dtype.get(config.model.dtype)
    device = cluster.device
    for wrong, reason, needed in (
        (device.is_cpu, "it needs GPUs", "Remove it, or plan for GPUs with --gpu."),
        (device.fp8 <= device.bf16, f"{device.name.upper()} has no units for it", "Remove it."),
        (recipe == "mxfp8" and not device.fp4, f"{device.name.upper()} has no units for its recipe mxfp8",
         "Set megatron.fp8_recipe to blockwise or tensorwise."),
        (config.model.dtype in ("float32", "float16"),
         f"the other weights are bfloat16, and model.dtype is {config.model.dtype}",
         "Set model.dtype to bfloat16 or auto."),
        (config.training.lora.rank > 0, "adapters (training.lora) are on layers without it", "Remove one of the two."),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(f"megatron.fp8 = {fp8} is refused: {reason}.", needed)
    return "fp8"


def moment_bytes(passed: Mapping[str, Any]) -> int:
    """Return the bytes of Adam's two moments of a parameter by Megatron's OptimizerConfig."""
    if not passed.get("use_precision_aware_optimizer"):
        return 8
    names = (str(passed.get(name, "float32")) for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    return sum({"float32": 4, "fp32": 4, "uint8": 1, "fp8": 1}.get(name, 2) for name in names)


def _why_turns(config: RlctlConfig, *, reward_model: bool) -> str:
    """Return why runs of a sweep cannot have their own engines; empty: they can."""
    if config.training.offload:
        return "training.offload moves the policy to host memory while engines sample"
    if reward_model:
        return "the reward model computes between the steps of the policy"
    return ""


def plan_from_config(
    config: RlctlConfig,
    facts: ModelFacts,
    workload: Workload,
    *,
    assume: str | None = None,
    top: int = 5,
    teachers: Sequence[ModelFacts] = (),
    refusal: Refusal = lambda _: None,
    held_adapters: int = 1,
) -> Plan:
    """Return the plan of a configuration; `refusal` returns why a backend cannot run it. `held_adapters`: adapters over
    one base, as of a sweep. Raises ConfigError, NoPlanError or MachineError."""
    cluster = cluster_from_config(config, assume)
    pins = pins_from_config(config)
    if workload.trains:
        _require_effects(config, facts, pins)
        _require_packed(config, facts, workload)
    constants, engine = DEFAULTS, PLAIN_ENGINE
    if with_engines := config.engine_settings:
        require_mover(with_engines, pins, trains=workload.trains)
        passed = with_engines.vllm
        engine = EngineNumbers(
            packed_matrix_bytes(facts) or passed.matrix_bytes, passed.cache_element_bytes, passed.graphs
        )
        if with_engines.refit.staging_mb is not None and not cluster.is_cpu:
            constants = replace(constants, staging_bytes=with_engines.refit.staging_mb * 1024.0**2)
    if not workload.engines:
        pins = {key: value for key, value in pins.items() if not key.startswith(("generation.", "refit."))}
    if not workload.trains:
        models = ("training.", "teacher.", "reward_model.")
        of_training = (*models, "generation.colocated", "generation.devices", "refit.mover")
        pins = {key: value for key, value in pins.items() if not key.startswith(of_training)}
    require_format(config, cluster)
    precision, lora = precision_from_config(config, cluster), config.training.lora
    adapters = _adapters(config, facts, workload, held_adapters, teaches=bool(teachers), on_cpu=cluster.is_cpu)
    # rlctl gives Megatron float32 unless the user passes another dtype.
    gradient_bytes = 2 if config.ddp.passed.get("grad_reduce_in_fp32") is False else 4
    unfused = config.megatron.passed.get("transformer_impl") == "local" or _lacks_transformer_engine(config, assume)
    own_layers = lora.rank > 0 or config.megatron.passed.get("transformer_impl") == "local"
    grouped = not own_layers and config.megatron.passed.get("moe_grouped_gemm") is not False
    flex = config.megatron.passed.get("moe_token_dispatcher_type") == "flex"
    request = Request(
        facts, cluster, workload, pins, constants, precision, adapters, engine, grouped, gradient_bytes,
        moment_bytes(config.optimizer.passed), teachers[0] if teachers else None,
        role="teacher" if config.named_teacher else "reward_model",
        further_teachers=tuple(teachers[1:]),
        teaching=_teacher_work(config, workload, min([facts.vocab, *(teacher.vocab for teacher in teachers)])),
        muon_steps=config.optimizer.muon_steps if config.optimizer.optimizer == "muon" else 0,
        own_layers=unfused and not cluster.is_cpu,
        saves=config.run.save_final or config.run.checkpoint_every != 0,
        save_copies=config.run.save_copies,
        memory_checkpoint_every=config.run.memory_checkpoint_every if config.cluster.policy_restarts else 0,
        dispatcher="flex" if flex else "alltoall",
        discards=config.engine_settings is not None and config.engine_settings.generation.discard_weights,
    )  # fmt: skip
    return make_plan(request, top=top, refusal=refusal)


def _adapters(
    config: RlctlConfig, facts: ModelFacts, workload: Workload, held: int, *, teaches: bool, on_cpu: bool
) -> LoraChoice | None:
    """Return the sizes of the adapters, the way to refit and its alternatives; None without adapters."""
    lora = config.training.lora
    adapters = lora_choice(facts, lora) if lora.rank else None
    ways = choose_refit(config, facts, adapters, refits=workload.trains and workload.engines, on_cpu=on_cpu)
    if adapters is None:
        return None
    turns = _why_turns(config, reward_model=teaches and config.named_teacher is None)
    adapters = replace(adapters, held=held, why_turns=turns)
    first, *others = (replace(adapters, refit=refit, why=rule) for refit, rule in ways)
    return replace(first, others=tuple(others))


def _teacher_work(config: RlctlConfig, workload: Workload, vocab: int) -> TeacherWork:
    """Return the work of a run's teachers. Where several read a row and less than the vocabulary of their mixture is
    compared, each is asked again, for the most likely tokens of the others."""
    if (teacher := config.teacher_section) is None or not teacher.models:
        return TeacherWork()
    computed, sources = config.listed_teachers, owners_of(teacher, config.data.source_labels).values()
    separate = teacher.mix == "divergences"
    compared = max(map(len, sources)) if separate else 1
    if not computed:
        return TeacherWork(compared=compared)
    counts = [sum(number in computed for number in numbers) for numbers in sources]
    again = 0 < workload.teacher_top < vocab and max(counts) > 1 and not separate
    passes = sum(count * (1 + (again and count > 1)) for count in counts) / len(counts)
    return TeacherWork(len(computed), passes, 1 + again, max(counts) if again else 1, compared)


def _require_effects(config: RlctlConfig, facts: ModelFacts, pins: Mapping[str, Any]) -> None:
    """Raise ConfigError for a set key that training cannot follow, or that is for a model that the run lacks."""
    for key in ("packing", "share_prompts") if facts.unpacked else ():  # unset, the planner decides
        if key in config.training.model_fields_set and getattr(config.training, key):
            raise ConfigError(f"training.{key} = true is refused: {unpacked_rule(facts)}.", "Leave it out.")
    lacking = [] if config.reward_models else [("reward_model.", "no reward model", "--reward model:DIR")]
    lacking += [] if config.named_teacher else [("teacher.", "no teacher", "--teacher NAME")]
    for section, needed, flag in lacking:
        if idle := [key for key in pins if key.startswith(section)]:
            raise ConfigError(f"{idle[0]} = {pins[idle[0]]} has no effect: there is {needed}.", f"Name one: {flag}.")


def _require_packed(config: RlctlConfig, facts: ModelFacts, workload: Workload) -> None:
    """Raise ConfigError for methods and settings with which packed layers are not trained."""
    if facts.quantized is None:
        return
    packed = f"{config.model.name} is quantized ({facts.quantized.method})"
    if workload.engines:
        raise ConfigError(
            f"{packed}, and engines beside a trainer take weights as numbers only: they would have to keep the packed "
            "base and take adapters alone.",
            "Train on texts (`rlctl train sft`, `dpo`), which needs no engines, or use the model without quantization.",
        )
    if not config.training.lora.rank:
        raise ConfigError(
            f"training.lora.rank = 0 is refused: {packed}, so that only adapters train.",
            "Add --lora, or use the model without quantization.",
        )


def packed_matrix_bytes(facts: ModelFacts) -> float | None:
    """Return the mean bytes of a layer's weight in an engine of a packed model; None: it is not packed."""
    packed, layers = packed_sizes(facts), count(facts).layers
    return (packed.engine_bytes + 2.0 * (layers - packed.weights)) / layers if packed.weights else None


def _lacks_transformer_engine(config: RlctlConfig, assume: str | None) -> bool:
    """Whether this machine's GPUs train without an installed TransformerEngine."""
    here = config.cluster.ray_address is None and (assume is None or config.cluster.gpu == "auto")
    return here and find_spec("transformer_engine") is None and bool(local_gpus())


def require_mover(config: EngineConfig, pins: Mapping[str, Any], *, trains: bool) -> None:
    """Raise ConfigError where a mover lacks the directory that it needs, or has one that it does not use."""
    mover, directory = pins.get("refit.mover"), config.refit.directory
    if mover is not None and trains:
        transport_facts(mover).require_directory(directory)
    if directory is not None and (mover is None or not transport_facts(mover).stored):
        users = list(storing())
        raise ConfigError(
            f"refit.directory = {directory} has no effect: only refit.mover = {' or '.join(users)} uses one.",
            f"Remove it, or add --set refit.mover={users[0]}.",
        )

"""Plans for the machine at hand count the memory that it has, and take any GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlctl.backends.vllm.args import refuse_unsupported
from rlctl.commands.doctor import wanted
from rlctl.doctor import deep
from rlctl.doctor.finding import Check
from rlctl.doctor.gpus import Gpu, check_driver, check_gpus, check_other_programs, check_whole, list_gpus
from rlctl.doctor.network import NodeFacts, compare_memory
from rlctl.errors import ConfigError, MachineError, NoPlanError
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.catalog import lookup
from rlctl.planner import from_config
from rlctl.planner.from_config import cluster_from_config
from rlctl.planner.inputs import cluster
from rlctl.planner.inputs.cluster import GIB, device_named, granted_memory, match_device
from rlctl.planner.views.render import plan_json, plan_text
from rlctl.preparation.run_workers import policy_environment
from rlctl.preparation.worker_specs import planned_workers
from rlctl.settings.training import TrainingConfig
from rlctl.telemetry.phases import Phase
from support.plans import plan_of

SMI = """#!/bin/sh
case "$*" in
  *mig.mode*) echo "0, GPU-1, ${MIG:-[N/A]}" ;;
  *memory.used*) echo "0, 812, $MEM" ;;
  *compute-apps*) ;;
  *compute_cap*) echo "0, GPU-1, $NAME, $CAP" ;;
  *memory.total*) echo "0, GPU-1, $NAME, $MEM, 580.95.05" ;;
  *) echo "0, GPU-1, $NAME" ;;
esac
"""


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let nvidia-smi report one GPU by its name, its MiB and its compute capability."""

    def report(name: str, mib: int | str, capability: str = "[N/A]") -> None:
        (tmp_path / "nvidia-smi").write_text(SMI)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        for key, value in {"NAME": name, "MEM": str(mib), "CAP": capability}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("RLCTL_MACHINE_PROFILE", str(tmp_path / "none.json"))

    return report


def config(*sets: str) -> RlConfig:
    return resolve("1gpu", sets=["model.name=Qwen/Qwen3-0.6B", *sets], environment={}).config


@pytest.mark.parametrize(
    ("reported", "mib", "most", "name"),
    [
        ("NVIDIA GeForce RTX 4090", 24564, 23.6, "rtx4090"),
        ("NVIDIA A100-SXM-64GB", 65536, 64, "a100"),
        ("NVIDIA H100 64GB HBM2", 65247, 64, "h100"),
        ("Tesla V100-SXM2-16GB", 16384, 16, "v100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, 16, "rtx-4090-laptop"),
        ("NVIDIA H100 80GB HBM3", 81559, 79.2, "h100"),
    ],
)
def test_memory_is_the_smaller_of_table_and_machine(card, reported: str, mib: int, most: float, name: str) -> None:
    card(reported, mib)
    device = cluster_from_config(config()).device
    assert device.name == name
    assert most - 1 <= device.memory / GIB <= most
    assert device.host_memory <= granted_memory()


def test_a_run_of_a_named_gpu_has_this_machines_memory_and_a_plan_for_another_does_not(card) -> None:
    card("NVIDIA GeForce RTX 4090", 24564)
    here, elsewhere = config("cluster.gpu=h100"), config("cluster.gpu=h100", "cluster.ray_address=10.0.0.1:6379")
    assert cluster_from_config(here).device.memory < 24 * GIB  # a run
    assert cluster_from_config(here, assume="h100").device.memory > 79 * GIB  # a plan
    assert cluster_from_config(elsewhere).device.memory > 79 * GIB
    same = cluster_from_config(config("cluster.gpu=rtx4090"), assume="h100").device
    assert same.host_memory <= granted_memory()


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090"), ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx4080"), ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"), ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"), ("NVIDIA A40", "a40"), ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"), ("Tesla V100-SXM2-32GB", "v100"), ("NVIDIA GB10", "gb10"), ("Tesla T4", None),
        ("Quadro RTX 6000", None), ("NVIDIA A100-PCIE-40GB", "a100-40gb"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GeForce RTX 4070", None), ("NVIDIA A1000", None),
    ],
)  # fmt: skip
def test_names_of_gpus(reported: str, name: str | None) -> None:
    assert match_device(reported) == name


@pytest.mark.parametrize(
    ("capability", "like"),
    [("8.9", "rtx4080"), ("8.6", "a10g"), ("12.0", "rtx5090"), ("7.5", "v100"), ("[N/A]", "rtx4080")],
)
def test_an_unknown_gpu_is_planned_with_the_rates_of_a_similar_one(card, capability: str, like: str) -> None:
    card("NVIDIA Something 9", 16384, capability)
    cluster = cluster_from_config(config())
    assert (cluster.device.bf16, cluster.device.name) == (device_named(like).bf16, "something-9")
    assert cluster.device.memory < 16 * GIB
    assert f"the rates of {like.upper()}" in cluster.device.note


def test_a_gpu_without_bfloat16_is_planned_in_float16_alone() -> None:
    facts, machine = lookup("Qwen/Qwen3-0.6B"), ["cluster.gpu=v100", "generation.max_new_tokens=128"]
    assert facts is not None
    with pytest.raises(ConfigError, match="has no units for it") as caught:
        plan_of(config(*machine), facts)
    assert "model.dtype=float16" in (caught.value.hint or "")
    assert plan_of(config(*machine, "model.dtype=float16"), facts).runnable


def test_memory_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    machine = granted_memory(tmp_path / "none", tmp_path / "none")
    for name, text in {"job/memory.max": 3 * GIB, "job/step/memory.max": "max", "memory/a/b/memory.limit_in_bytes": GIB,
                       "memory/memory.limit_in_bytes": 9223372036854771712}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    own.write_text("0::/job/step\n")
    assert granted_memory(tmp_path, own) == 3 * GIB
    own.write_text("4:cpu,memory:/a/b\n0::/\n")
    assert granted_memory(tmp_path, own) == GIB
    own.write_text("0::/\n")
    assert granted_memory(tmp_path, own) == machine


@pytest.mark.long
def test_doctor_wants_what_the_plan_needs(card) -> None:
    card("NVIDIA GeForce RTX 4090", 24564)
    found = wanted(config("model.name=Qwen/Qwen3-32B"))
    assert found.no_plan
    elsewhere = ["cluster.gpu=h100", "cluster.gpus_per_node=8", "cluster.ray_address=10.0.0.1:6379"]
    assert wanted(config("model.name=Qwen/Qwen3-32B", *elsewhere)).host_memory > 100 * GIB


def test_the_node_with_the_least_memory_counts() -> None:
    def node(gib: float) -> NodeFacts:
        return NodeFacts(True, 1, True, 0.0, {}, memory=gib * GIB)

    nodes = {"10.0.0.1": node(2000), "10.0.0.2": node(100)}
    found: Check = compare_memory(nodes, 200 * GIB)
    assert (found.status, "10.0.0.2 has the least memory" in found.detail) == ("fail", True)
    assert compare_memory(nodes, 50 * GIB).status == "ok"


def test_cuda_13_has_no_kernels_for_volta() -> None:
    def ask(*words: str) -> str:
        return "7.0\n" if words and "compute_cap" in words[0] else "CUDA Version: 13.0"

    versions = {"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96"}
    found = check_driver((Gpu("Tesla V100-SXM2-32GB", 32 * GIB, "580.1"),), versions, ask)
    assert (found.status, "compute capability 7.0" in found.detail) == ("fail", True)
    assert (
        check_driver((Gpu("Tesla V100-SXM2-32GB", 32 * GIB, "580.1"),), {"torch": "2.13.0+cu129"}, ask).status == "ok"
    )


def test_training_processes_have_expandable_segments_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert policy_environment(None, "cuda", TrainingConfig())["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in policy_environment(1, "cpu", TrainingConfig())
    own = TrainingConfig(env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert "PYTORCH_ALLOC_CONF" not in policy_environment(None, "cuda", own)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert "PYTORCH_ALLOC_CONF" not in policy_environment(None, "cuda", TrainingConfig())


def test_router_replay_is_refused_with_engines_in_stages() -> None:
    facts = lookup("Qwen/Qwen3-30B-A3B")
    assert facts is not None
    asked = config("training.router_replay=true", "generation.pp=2")
    with pytest.raises(ConfigError, match=r"generation\.pp = 2"):
        refuse_unsupported(asked, facts, "cuda")


@pytest.mark.parametrize(("model", "granted", "copies"), [
    ("Qwen/Qwen3-0.6B", 31, True), ("Qwen/Qwen3-0.6B", 23, False), ("Qwen/Qwen3-1.7B", 62, True),
    ("Qwen/Qwen3-1.7B", 47, False),
])  # fmt: skip
def test_a_consumer_card_is_planned_in_a_usual_host(
    card, monkeypatch: pytest.MonkeyPatch, model: str, granted: int, copies: bool
) -> None:
    """Desktops with 32 and 64 GB, and with a quarter less, where a save copies nothing."""
    card("NVIDIA GeForce RTX 4090", 24564)
    monkeypatch.setattr(cluster, "granted_memory", lambda: granted * GIB)
    facts = lookup(model)
    assert facts is not None
    plan = plan_of(config(f"model.name={model}"), facts)
    assert plan.save_copies is copies
    assert plan.host_memory <= granted * GIB
    assert ("a save copies nothing" in plan_text(plan, model)) is not copies
    saved = plan_json(plan)["checkpoint"]
    assert (saved["copy_s"] == saved["write_s"]) is not copies
    spec = planned_workers(config(f"model.name={model}"), facts, plan, Path("model"), None)
    assert spec.policy.save_copies is copies


def test_short_host_memory_is_refused_with_advice_for_this_machine(card, monkeypatch: pytest.MonkeyPatch) -> None:
    card("NVIDIA GeForce RTX 4090", 24564)
    monkeypatch.setattr(cluster, "granted_memory", lambda: 15 * GIB)
    with pytest.raises(NoPlanError, match="of 15 of host memory a node") as caught:
        plan_of(config(), lookup("Qwen/Qwen3-0.6B"))
    need = re.search(r"in a container\) with (\d+) GiB of memory a node; this one has 15", caught.value.hint or "")
    assert need, caught.value.hint
    assert "gh200" not in (caught.value.hint or "")
    monkeypatch.setattr(cluster, "granted_memory", lambda: int(need[1]) * GIB)
    assert plan_of(config(), lookup("Qwen/Qwen3-0.6B")).runnable
    with pytest.raises(NoPlanError, match="host memory") as caught:
        plan_of(config("run.save_copies=true"), lookup("Qwen/Qwen3-0.6B"))
    assert "run.save_copies=false" in (caught.value.hint or "")


@pytest.mark.parametrize(("visible", "mode", "said"), [
    ("MIG-5f1b", "[N/A]", "CUDA_VISIBLE_DEVICES names a MIG slice (MIG-5f1b)"),
    ("MIG-GPU-1/3/0", "Enabled", "names a MIG slice"), (None, "Enabled", "GPU 0 is split into MIG slices"),
])  # fmt: skip
def test_plan_dry_run_and_doctor_refuse_mig_slices_in_the_same_words(
    card, monkeypatch: pytest.MonkeyPatch, visible: str | None, mode: str, said: str
) -> None:
    card("NVIDIA H100 80GB HBM3", 81559)
    monkeypatch.setenv("MIG", mode)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for assumed in (None, "h100"):
        with pytest.raises(MachineError, match=re.escape(said)) as caught:
            cluster_from_config(config(), assume=assumed)
    with pytest.raises(MachineError):
        cluster_from_config(config("cluster.gpu=h100"))
    split = check_whole(1, "auto")
    assert split is not None
    assert (split.status, f"{split.detail}.", split.fix) == ("fail", caught.value.message, caught.value.hint)
    with pytest.raises(MachineError, match=re.escape(said)):
        deep.deep("auto", [], None, Path(), lambda _: None)
    assert cluster_from_config(config("cluster.gpu=a100"), assume="h100").device.name == "a100"  # another machine
    assert cluster_from_config(config("cluster.gpu=cpu")).is_cpu
    assert check_whole(0, "cpu") is None


def test_a_gpu_that_shares_its_memory_is_planned_and_found(card) -> None:
    """The driver reports [N/A] as the memory of a GB10."""
    card("NVIDIA GB10", "[N/A]")
    planned = cluster_from_config(config()).device
    (found,) = list_gpus()
    assert (found.name, found.memory_bytes) == ("NVIDIA GB10", int(device_named("gb10").memory))
    assert planned.name == "gb10"
    assert check_gpus((found,), 1, "auto").status == "ok"
    assert check_other_programs().status == "ok"


def test_a_plan_knows_of_transformer_engine_and_graphs_and_fills_rows(card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU run on record: one H100 without TransformerEngine and graphs took 2.7 and 2 times the planned seconds."""
    card("NVIDIA H100 80GB HBM3", 81559)
    facts = lookup("Qwen/Qwen3-0.6B")
    assert facts is not None
    short = ("model.max_length=512", "generation.max_new_tokens=256")
    here = plan_of(config(*short), facts)
    monkeypatch.setattr(from_config, "find_spec", lambda name: object())
    fused = plan_of(config(*short), facts)
    local = plan_of(config(*short, "megatron.transformer_impl=local"), facts)
    eager = plan_of(config(*short, "vllm.enforce_eager=true"), facts)
    assert here.training is not None
    assert here.training.micro_batch_tokens >= 8192  # and not four texts of 512
    assert here.seconds[Phase.TRAINING] == pytest.approx(local.seconds[Phase.TRAINING])
    assert 1.5 < local.seconds[Phase.TRAINING] / fused.seconds[Phase.TRAINING] < 3
    assert eager.seconds[Phase.GENERATION] > 1.5 * fused.seconds[Phase.GENERATION]
    texts = [" ".join(f"{one.value} {one.rule}" for one in plan.reasons) for plan in (here, local, fused, eager)]
    assert ["2.7 times the time of TransformerEngine's" in text for text in texts] == [True, True, False, False]
    assert ["vllm.enforce_eager: the host launches" in text for text in texts] == [False, False, False, True]
    assert plan_of(config(*short, "cluster.gpu=a100"), facts, assume="h100").request.own_layers is False

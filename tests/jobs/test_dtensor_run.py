"""`rlctl train grpo --backend dtensor` as a user runs it: the same metrics as with Megatron, exported and resumed; so
with adapters, a critic and a teacher; and what is common to both backends with weights on a grid."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from rlctl.checkpoints.conversion.peft_adapters import megatron_to_peft
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.tiny_models.text import VOCAB_SIZE, write_tiny_family, write_tokenizer
from support.runs import STEPS, command, results, resume, same_run


@pytest.mark.slow
def test_the_laptop_preset_takes_the_same_first_steps_on_both_backends(here, tmp_path: Path) -> None:
    """SmolLM2-135M itself: the same tokens and rewards, and what follows from them to float32's rounding."""
    found = []
    for backend in ("megatron", "dtensor"):
        done = here(["rlctl", "train", "grpo", "--preset", "laptop", "--steps", "2", "--backend", backend,
                     "--set", "model.dtype=float32", "--run-dir", str(tmp_path / backend)])  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(results(tmp_path / backend))
    theirs, ours = found
    same_run(theirs, ours)
    for one, other in zip(theirs, ours, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def begun_and_changed(here, model: Path, place: Path, *more: str) -> tuple[list[dict], list[dict]]:
    """The metrics of a run of Megatron's, and of one that two ranks of dtensor begin and Megatron goes on with."""
    whole, changed = place / "whole", place / "changed"
    done = here(command(model, whole, *more))
    assert done.returncode == 0, done.stderr
    half = ("--backend", "dtensor", "--steps", str(STEPS // 2), "--set", "training.dp=2")
    done = here(command(model, changed, *more, *half))
    assert done.returncode == 0, done.stderr
    generated_as_exported(here, changed, place)
    done = here(resume(changed, "--steps", str(STEPS), "--backend", "megatron", "--set", "training.dp=1"))
    assert done.returncode == 0, done.stderr
    assert [line.keys() for line in results(changed)] == [line.keys() for line in results(whole)]
    same_run(results(whole), results(changed))
    return results(whole), results(changed)


def generated_as_exported(here, run: Path, place: Path) -> None:
    """A run's checkpoint and the model that it is exported to complete a prompt alike."""
    assert megatron_to_hf(run, place / "exported").verified
    shown = []
    for model in (["--run-dir", str(run)], ["--model", str(place / "exported"), "--gpu", "cpu"]):
        asked = ["--prompt", "2 + 3", "--max-new-tokens", "4", "--temperature", "0", "--json"]
        done = here([str(Path(sys.executable).with_name("rlctl")), "generate", *model, *asked])
        assert done.returncode == 0, done.stderr
        shown.append(json.loads(done.stdout)["completions"][0])
    assert shown[0]["token_ids"] == shown[1]["token_ids"]
    assert shown[0]["logprobs"] == pytest.approx(shown[1]["logprobs"], abs=1e-4)


@pytest.mark.slow
def test_adapters_are_trained_exported_and_gone_on_with_by_the_other_backend(here, tiny_llama, tmp_path) -> None:
    more = ("--set", "training.lora.rank=4", "--set", "loss.kl_coefficient=0.05")
    whole, changed = begun_and_changed(here, tiny_llama, tmp_path, *more)
    assert changed[0]["kl"] == pytest.approx(0, abs=1e-9)  # B is 0: the policy is the reference
    assert changed[1]["kl"] == pytest.approx(whole[1]["kl"], rel=1e-3)
    written = megatron_to_peft(tmp_path / "changed", tmp_path / "adapters")
    assert written.verified


@pytest.mark.slow
def test_a_critic_is_trained_and_gone_on_with_by_the_other_backend(here, tiny_llama, tmp_path) -> None:
    more = ("--algorithm", "ppo", "--set", "critic.lr=3e-3", "--set", "batch.optimizer_steps=2")
    whole, changed = begun_and_changed(here, tiny_llama, tmp_path, *more)
    for ours, theirs in zip(changed, whole, strict=True):
        assert ours["critic"] == pytest.approx(theirs["critic"], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_teacher_teaches_the_same_on_both_backends(here, tiny_llama, tmp_path) -> None:
    teacher = write_tiny_family(tmp_path / "teacher", seed=5, num_hidden_layers=3)
    form = ("--algorithm", "distillation", "--teacher", str(teacher), "--set", "distillation.loss=top-k")
    for name in ("megatron", "dtensor"):
        done = here(command(tiny_llama, tmp_path / name, *form, "--backend", name, "--steps", "2"))
        assert done.returncode == 0, done.stderr
    theirs, ours = (results(tmp_path / name) for name in ("megatron", "dtensor"))
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert other["teacher_kl"] > 0
        for name in ("teacher_kl", "loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6)


SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHERS = {
    "Gemma2": {
        "query_pre_attn_scalar": 32, "sliding_window": 64, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Qwen2Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
    "GPTNeoX": {"num_key_value_heads": None},
    "Falcon": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
}  # fmt: skip


def write_model(place: Path, family: str) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    values = {key: value for key, value in (SIZES | OTHERS[family]).items() if value is not None}
    config = getattr(transformers, f"{family}Config")(**values)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(place)
    write_tokenizer(place)
    return place


@pytest.mark.slow
def test_a_teacher_whose_rollouts_are_not_packed_teaches_a_policy_whose_are(here, tiny_llama, tmp_path) -> None:
    """It is not a conversion of Megatron's, and its numbers do not depend on the ranks."""
    teacher = write_model(tmp_path / "teacher", "Falcon")
    form = ("--algorithm", "distillation", "--teacher", str(teacher), "--steps", "2")
    for ranks in (1, 2):
        done = here(command(tiny_llama, tmp_path / f"{ranks}", *form, "--set", f"training.dp={ranks}"))
        assert done.returncode == 0, done.stderr
    same_run(results(tmp_path / "1"), results(tmp_path / "2"))
    assert results(tmp_path / "1")[0]["teacher_kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_family_without_a_file_trains_and_is_exported(here, family: str, tmp_path: Path) -> None:
    """The engine's log-probs are those of the policy, whose steps agree whatever ranks it has."""
    write_model(tmp_path / "model", family)
    alone, ours = tmp_path / "alone", tmp_path / "ours"
    shards = ("--set", "training.dp=2", *(("--set", "training.ep=2") if family == "Qwen2Moe" else ()))
    for run_dir, sizes in ((alone, ()), (ours, shards)):
        done = here(command(tmp_path / "model", run_dir, "--backend", "dtensor", "--steps", "2", *sizes))
        assert done.returncode == 0, done.stderr
        assert all(line["logprob_diff"]["max"] < 1e-4 for line in results(run_dir))
    same_run(results(alone), results(ours))
    assert megatron_to_hf(ours, tmp_path / "exported").verified
    names = [SafetensorsDirectory.open(place).tensors.keys() for place in (tmp_path / "exported", tmp_path / "model")]
    assert names[0] == names[1]
    done = here(resume(ours, "--steps", "3"))
    assert done.returncode == 0, done.stderr
    assert len(results(ours)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_weights_on_a_grid_are_refitted_resumed_and_generated_with(here, tiny_llama, tmp_path, backend: str) -> None:
    """Engines hold what the policy computes with, at every step, and a resumed run is the run."""
    grid = ("--set", "model.dtype=bfloat16", "--set", "training.quantization.format=nvfp4", "--backend", backend,
            "--set", "refit.verify_every=1")  # fmt: skip
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    done = here(command(tiny_llama, whole, *grid))
    assert done.returncode == 0, done.stderr
    done = here(command(tiny_llama, halves, *grid, "--steps", str(STEPS // 2)))
    assert done.returncode == 0, done.stderr
    done = here(resume(halves, "--steps", str(STEPS)))
    assert done.returncode == 0, done.stderr
    for key in ("loss", "grad_norm", "reward_mean", "logprob_diff"):
        assert [line[key] for line in results(whole)] == [line[key] for line in results(halves)]
    assert all(0 < line["logprob_diff"]["mean"] < 0.05 for line in results(whole))
    asked = ["--prompt", "2 + 3", "--max-new-tokens", "4", "--temperature", "0", "--json"]
    done = here([str(Path(sys.executable).with_name("rlctl")), "generate", "--run-dir", str(halves), *asked])
    assert done.returncode == 0, done.stderr

"""`rlctl train grpo --backend dtensor` as a user runs it: the same metrics as with Megatron, exported and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from support.runs import STEPS, command, results, resume, same_run
from support.tiny_models import VOCAB_SIZE, write_tokenizer


@pytest.mark.slow
@pytest.mark.guard
def test_both_backends_run_the_same_steps(uninterrupted, here, tiny_llama: Path, tmp_path: Path) -> None:
    """Megatron on one rank; FSDP2 on two, whose run goes on with Megatron in the middle."""
    theirs, ours = uninterrupted[0], tmp_path / "dtensor"
    begun = command(tiny_llama, ours, "--backend", "dtensor", "--steps", str(STEPS // 2), "--set", "training.dp=2")
    done = here(begun)
    assert done.returncode == 0, done.stderr
    assert megatron_to_hf(ours, tmp_path / "exported").verified
    more = ("--steps", str(STEPS), "--backend", "megatron", "--set", "training.dp=1")
    done = here(resume(ours, *more))
    assert done.returncode == 0, done.stderr
    assert [line.keys() for line in results(ours)] == [line.keys() for line in results(theirs)]
    same_run(results(theirs), results(ours))


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
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_family_without_a_file_trains_and_is_exported(here, family: str, tmp_path: Path) -> None:
    """The engine's log-probs are those of the policy, whose steps agree whatever ranks it has."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **OTHERS[family])
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
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

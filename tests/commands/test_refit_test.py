"""`rlctl refit-test` as a user runs it, and what it says of a refit that goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron
from rlctl.commands.refit_test import text_of
from rlctl.jobs.refit_report import NOT_COMPARED, RefitTestReport
from rlctl.refit.records import RefitReport
from rlctl.refit.verify import TensorComparison
from rlctl.tiny_models.text import VOCAB_SIZE, write_tokenizer
from support.commands import Run

KEYS = {
    "model", "mover", "receive", "refits", "tensors", "mismatched", "missing", "extra", "payload_bytes",
    "staging_peak_bytes", "seconds", "seconds_first", "gb_per_s", "limit_gb_per_s", "fraction_of_limit", "logprobs",
    "passed",
}  # fmt: skip


def test_the_outcome_has_a_colour_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    def last(comparison: TensorComparison) -> str:
        test = RefitTestReport("tiny", "shared-memory", "direct", NOT_COMPARED, synthetic=True)
        test.reports, test.comparisons, test.verify_seconds = [RefitReport(1, {}, 1, 1)], [comparison], [0.1]
        test.limit_gb_per_s = 1.0
        return text_of(test)[-1]

    assert last(TensorComparison(3)) == "\x1b[32mevery tensor equal\x1b[0m"
    assert last(TensorComparison(3, missing=("a",))) == "\x1b[31mWRONG\x1b[0m  a is missing in the engine"
    monkeypatch.setenv("NO_COLOR", "1")
    assert last(TensorComparison(3)) == "every tensor equal"


@pytest.mark.slow
def test_refit_test_of_a_megatron_checkpoint(run_here: Run, tiny_llama: Path, tmp_path: Path) -> None:
    hf_to_megatron(tiny_llama, tmp_path / "ckpt")
    arguments = ["refit-test", "--model", str(tmp_path / "ckpt"), "--gpu", "cpu", "--json"]
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
    shard = tmp_path / "ckpt" / "release" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x10  # in the values of a tensor
    shard.write_bytes(content)
    done = run_here(*arguments)
    assert done.returncode == 5, done.stderr
    assert f"{tmp_path / 'ckpt'} was damaged since" in json.loads(done.stdout)["error"]["hint"]


@pytest.mark.guard
@pytest.mark.slow
def test_refit_test_passes_between_real_engines(run_here: Run, tiny_llama_tied: Path) -> None:
    arguments = [
        "refit-test", "--model", str(tiny_llama_tied), "--tp", "2", "--repeat", "3", "--gpu", "cpu", "--json",
        "--set", "training.threads=1", "--set", "generation.threads=1",
    ]  # fmt: skip
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= KEYS
    assert found["passed"] is True
    assert (found["refits"], found["tensors"]) == (3, 20)
    assert found["receive"] == "direct"
    assert sum(one["tensors"] for one in found["paths"]) == 20
    assert sum(one["bytes"] for one in found["paths"]) == found["payload_bytes"]
    assert found["mismatched"] == found["missing"] == found["extra"] == []
    assert found["logprobs"]["max_abs"] < 1e-3 < found["logprobs_before"]["max_abs"]
    parts = sum(value for phase, value in found["seconds"].items() if phase != "total")
    assert abs(parts - found["seconds"]["total"]) < 1e-6


@pytest.mark.slow
def test_changed_elements_alone_reach_an_engine(run_here: Run, tiny_llama: Path) -> None:
    """Plainly stored parameters take them; repacked ones are sent whole, and the result says so."""
    for plain, said in (("true", "2.0% of the elements have changed"), ("false", "everything: ")):
        arguments = [
            "refit-test", "--model", str(tiny_llama), "--repeat", "3", "--gpu", "cpu", "--json", "--sparse",
            "--set", f"generation.plain_parameters={plain}", "--set", "generation.threads=1",
        ]  # fmt: skip
        done = run_here(*arguments)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["passed"] is True
        assert found["sparse"].startswith(said)
        assert (found["sent_bytes"] < 0.1 * found["payload_bytes"]) == (plain == "true")


@pytest.mark.slow
def test_a_quantized_engine_takes_both_paths_and_each_tensor_says_which(run_here: Run, tiny_llama: Path) -> None:
    arguments = [
        "refit-test", "--model", str(tiny_llama), "--gpu", "cpu", "--json", "--explain",
        "--set", "model.dtype=bfloat16", "--set", "generation.threads=1", "--set", "vllm.quantization=online",
        "--set", "vllm.quantization_config={linear: fp8_per_channel}",
    ]  # fmt: skip
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["passed"], found["receive"]) == (True, "mixed")
    assert {one["path"] for one in found["paths"]} == set(found["reasons"]) == {"direct", "loader"}
    assert sum(one["tensors"] for one in found["paths"]) == len(found["tensor_paths"]) == 21
    assert sum(one["bytes"] for one in found["paths"]) == found["payload_bytes"]
    loaded = {one["name"] for one in found["tensor_paths"] if one["path"] == "loader"}
    assert loaded == {one["name"] for one in found["unread"]}
    assert all("_proj." in name for name in loaded)
    assert found["tensors"] == 21 - len(loaded)


SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHERS = {
    "GPT2": {"tie_word_embeddings": True},
    "GPTNeoX": {},
    "OPT": {"word_embed_proj_dim": 128, "ffn_dim": 256, "tie_word_embeddings": True},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
    "GPTJ": {"rotary_dim": 16},
    "Bloom": {"tie_word_embeddings": True},
    "GraniteMoe": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": {
        "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"], "conv_dim": 128, "conv_dim_out": 128,
        "block_dim": 128, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False, "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
    },
    "Apertus": {"num_key_value_heads": 2, "hidden_act": "xielu"},
    "Gemma3n": {
        "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64, "intermediate_size": [256, 256],
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0], "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "Gemma4": {
        "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "sliding_window": 64,
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16,
    },
}  # fmt: skip
COMPARED = {"GPTNeoX": 28, "OPT": 36, "GPTJ": 24, "Apertus": 27, "Gemma4": 39}
"""The number of tensors that are read back: all but the bias of GPT-J's output layer, and two numbers of the activation
in each layer of Apertus, whose stored buffers are."""
APPROXIMATE = {"Bloom": 2e-3, "Apertus": 1e-2}
"""Largest difference of log-probs where vLLM computes otherwise than transformers: another GELU, in BLOOM, and Apertus'
activation with parameters that are rounded to bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_family_that_transformers_alone_knows_reaches_an_engine(run_here: Run, family: str, tmp_path: Path) -> None:
    """Whatever order vLLM keeps its matrices in: the engine computes the log-probs of the policy."""
    import torch
    import transformers

    torch.manual_seed(0)
    text = "Text" if family in ("Gemma3n", "Gemma4") else ""
    settings = getattr(transformers, f"{family}{text}Config")(**(SIZES | OTHERS[family]))
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "output_scale" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    done = run_here(
        "refit-test", "--model", str(tmp_path / "model"), "--gpu", "cpu", "--json", "--set", "training.backend=dtensor",
        "--set", "training.threads=1", "--set", "generation.threads=1",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["mismatched"] == found["missing"] == found["extra"] == [], done.stderr
    assert found["logprobs"]["max_abs"] < APPROXIMATE.get(family, 1e-4) < 0.1 < found["logprobs_before"]["max_abs"]
    assert found["passed"] is (family not in APPROXIMATE)
    assert found["tensors"] >= COMPARED.get(family, 1)

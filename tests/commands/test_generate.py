"""`rlctl generate` as a user runs it: real engines, a tiny model, JSON Lines that the engine's own log-probs back."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from rlctl.commands.generate import text_of
from rlctl.errors import InputError
from rlctl.jobs.given_prompts import read_prompts
from rlctl.settings.data import DataConfig
from support.commands import Run


@pytest.mark.long
def test_generate_json_lines_agree_with_transformers(run_here: Run, tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is 3 + 4?"}) + "\n")
    done = run_here(
        "generate", "--model", str(tiny_llama), "--prompt", "Name a color.", "--prompts-file", str(prompts),
        "--n", "3",
        "--max-new-tokens", "12", "--temperature", "0.5", "--seed", "3", "--gpu", "cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["Name a color.", "What is 3 + 4?"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for record in records:
        messages = [{"role": "user", "content": record["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert len(record["completions"]) == 3
        assert len({tuple(c["token_ids"]) for c in record["completions"]}) > 1
        for completion in record["completions"]:
            ids = completion["token_ids"]
            assert completion["finish_reason"] in ("stop", "length")
            assert len(ids) == len(completion["logprobs"]) <= 12
            # vLLM leaves out a character that the length limit cuts in the middle of its bytes.
            kept = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
            whole = tokenizer.decode(kept, skip_special_tokens=False).rstrip("\ufffd")
            assert completion["text"].rstrip("\ufffd") == whole
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / 0.5
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert torch.allclose(expected, torch.tensor(completion["logprobs"]), atol=1e-4)


def test_prompts_come_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3 + 4?\n\nName a color.\n"))
    rows = read_prompts([], "-", DataConfig())
    assert [(row.where, row.prompt) for row in rows] == [
        ("stdin, line 1", "What is 3 + 4?"), ("stdin, line 3", "Name a color."),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\u2028prompt\x0cof a line\nanother"))
    assert [row.prompt for row in read_prompts([], "-", DataConfig())] == ["one\u2028prompt\x0cof a line", "another"]
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(InputError, match="stdin is a terminal"):
        read_prompts([], "-", DataConfig())


def test_several_completions_of_a_prompt_are_numbered() -> None:
    one, other = {"text": " Seven. ", "finish_reason": "stop"}, {"text": "Eig", "finish_reason": "length"}
    assert text_of({"prompt": "3 + 4?", "completions": [one]}) == "> 3 + 4?\nSeven.\n"
    numbered = text_of({"prompt": "3 + 4?", "completions": [one, other]})
    assert numbered == "> 3 + 4?\n1. Seven.\n2. Eig [cut off at the length limit]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to complete"),
        (["--prompts-file", "absent.txt"], "absent.txt cannot be read"),
        (["--prompt", "x", "--run-dir", "absent-run"], "absent-run"),
    ],
)
def test_bad_input_is_named(run_here: Run, arguments: list[str], message: str, tiny_llama: Path) -> None:
    done = run_here("generate", "--model", str(tiny_llama), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_prompts_are_completed_alike_by_one_engine_and_by_two(run_here: Run, tiny_llama: Path) -> None:
    """In the order of the prompts, whichever engine made the completion."""
    prompts = [
        argument for text in ("Name a color.", "What is 3 + 4?", "Say hello.") for argument in ("--prompt", text)
    ]
    outputs = []
    for engines in ("1", "2"):
        done = run_here(
            "generate", "--model", str(tiny_llama), *prompts, "--max-new-tokens", "8", "--seed", "3", "--gpu", "cpu",
            "--json", "--set", f"generation.engines={engines}", "--set", "generation.threads=1",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in done.stdout.splitlines()]
        outputs.append([(record["prompt"], record["completions"][0]["token_ids"]) for record in records])
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.guard
def test_a_megatron_checkpoint_generates_what_its_model_does(run_here: Run, tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    converted = run_here("convert", "hf-to-megatron", str(tiny_llama), str(tmp_path / "ckpt"))
    assert converted.returncode == 0, converted.stderr
    done = run_here(
        "generate", "--model", str(tmp_path / "ckpt"), "--prompt", "Name a color.", "--max-new-tokens", "8",
        "--temperature", "0", "--gpu", "cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ids = json.loads(done.stdout)["completions"][0]["token_ids"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "Name a color."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == ids
    shard = tmp_path / "ckpt" / "release" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x10  # in the values of a tensor
    shard.write_bytes(content)
    damaged = run_here("generate", "--model", str(tmp_path / "ckpt"), "--prompt", "Name a color.", "--gpu", "cpu")
    assert damaged.returncode == 5, damaged.stderr
    assert f"{tmp_path / 'ckpt'} was damaged since" in damaged.stderr

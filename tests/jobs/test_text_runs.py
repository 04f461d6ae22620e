"""Runs on texts and on pairs, as a user starts them: no engine, a falling loss, validation, and a resume."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.cluster.ray_session import fetch
from rlctl.data.cross_tokens import Projection
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import chunk_column
from rlctl.rewards.reward_model_scorer import ModelScorer
from rlctl.rollouts.dataset import TextGroup
from rlctl.telemetry.metrics import read_metrics
from rlctl.tiny_models.text import write_tiny_family
from rlctl.training.loop import Loop
from support.commands import Run
from support.divergences import logits_of, of_chunks, of_tokens
from support.metric_lines import without_timing
from support.runs import cut_after
from support.toy_tokenizers import CORPUS, by_bytes, by_words

LAYOUT = ("--gpu", "cpu", "--set", "training.threads=1", "--seed", "1", "--set", "model.convert=false")


def lines_of(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    sums = [(a, b) for a in range(6) for b in (3, 7)]
    rows: list[dict[str, Any]] = [{"prompt": f"What is {a} + {b}?", "completion": f"It is {a + b}."} for a, b in sums]
    rows.append({"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is 3."}]})
    rows.append({"text": "A model reads tokens and writes tokens."})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [
        {"prompt": f"What is {a} + 3?", "chosen": f"It is {a + 3}.", "rejected": "I do not know what that is."}
        for a in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", pytest.param("dtensor", marks=pytest.mark.guard)])
def test_a_model_is_trained_on_texts_and_resumed_as_if_it_had_not_stopped(
    run_here: Run, tiny_llama: Path, texts: Path, tmp_path: Path, backend: str
) -> None:
    whole = tmp_path / "whole"
    done = run_here(
        "train", "sft", "--model", str(tiny_llama), "--data", str(texts), *LAYOUT, "--backend", backend, "--lr",
        "3e-3", "--steps", "5", "--batch-size", "4", "--max-length", "96", "--run-dir", str(whole),
        "--set", "validation.holdout=3", "--set", "validation.every=2", "--set", "validation.at_start=true",
        "--set", "training.dp=2", "--set", "run.checkpoint_every=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "validation before step 1: loss" in done.stderr
    part, lines = cut_after(3, whole, tmp_path / "part"), lines_of(whole)
    assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds"} <= lines[0].keys()
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[3]["validation"]["loss"] < lines[0]["validation_at_start"]["loss"]
    assert lines[0]["seconds"]["generation"] == lines[0]["seconds"]["refit"] == 0
    assert sorted(path.name for path in (whole / "logs").iterdir()) == ["driver.log", "policy-0.log", "policy-1.log"]
    assert "loss" in (whole / "report.html").read_text()
    done = run_here("train", "sft", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]
    done = run_here("train", "dpo", "--resume", "--run-dir", str(part), "--steps", "6")
    assert done.returncode == 2
    assert "`run.algorithm` = 'dpo' (train dpo), but the run was begun with 'sft'" in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.guard
def test_preferences_are_learned_and_answers_shown(
    run_here: Run, tiny_llama: Path, pairs: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    done = run_here(
        "train", "dpo", "--model", str(tiny_llama), "--data", str(pairs), *LAYOUT, "--lr", "1e-3", "--epochs", "2",
        "--batch-size", "3", "--beta", "0.2", "--run-dir", str(whole), "--set", "training.dp=1",
        "--set", "run.checkpoint_every=3", "--set", f"validation.data.name={pairs}", "--set", "validation.every=3",
        "--set", "validation.answers=2", "--set", "generation.max_new_tokens=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    part, lines = cut_after(3, whole, tmp_path / "part"), lines_of(whole)
    assert "tensors compared, all equal" in done.stderr  # the engine's weights are those of the third step
    kept = [json.loads(line) for line in (whole / "validation" / "step_3.jsonl").read_text().splitlines()]
    assert [(one["reward"], one["tokens"] > 0) for one in kept] == [(None, True)] * 2
    assert all(line["seconds"]["generation"] == line["seconds"]["refit"] == 0 for line in lines)
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]
    last = [(run / "validation" / "step_6.jsonl").read_text() for run in (whole, part)]
    assert last[0] == last[1] != (whole / "validation" / "step_3.jsonl").read_text()
    assert len(lines) == 6
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference: log 2
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert lines[-1]["loss"] < 0.6
    assert lines[-1]["rewards/accuracies"] == 1
    assert lines[-1]["rewards/margins"] == pytest.approx(lines[-1]["rewards/chosen"] - lines[-1]["rewards/rejected"])
    assert all(line["logps/chosen"] < 0 and line["logps/rejected"] < 0 for line in lines)
    assert [line["pairs"] for line in lines] == pytest.approx([3] * 6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_reference_that_is_computed_before_the_first_step_gives_the_same_losses(
    run_here: Run, tiny_llama: Path, pairs: Path, tmp_path: Path, backend: str
) -> None:
    wanted = (
        "train", "dpo", "--model", str(tiny_llama), *LAYOUT, "--lr", "1e-3", "--steps", "4", "--batch-size", "3",
        "--set", "training.dp=2", "--backend", backend, "--set", "run.checkpoint_every=2", "--set",
        f"validation.data.name={pairs}", "--set", "validation.at_end=true", "--data",
    )  # fmt: skip
    held, whole, given = tmp_path / "held", tmp_path / "whole", tmp_path / "given.jsonl"
    done = run_here(*wanted, str(pairs), "--run-dir", str(held))
    assert done.returncode == 0, done.stderr
    once = ("--set", "preference.precompute=true", "--run-dir")
    done = run_here(*wanted, str(pairs), *once, str(whole))
    assert done.returncode == 0, done.stderr
    part, expected = cut_after(2, whole, tmp_path / "part"), lines_of(held)
    names = ("loss", "grad_norm", "rewards/margins", "logps/chosen")
    for line, other in zip(lines_of(whole), expected, strict=True):
        assert [line[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4, abs=1e-6)
    assert lines_of(whole)[-1]["validation"]["loss"] == pytest.approx(expected[-1]["validation"]["loss"], rel=1e-4)
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines_of(whole))]

    logps = json.loads((whole / "reference.json").read_text())["training"]["logps"]
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for place, (chosen, rejected) in ((int(key.rpartition(":")[2]), both) for key, both in logps.items()):
        rows[place] |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_here(*wanted, str(given), *once, str(tmp_path / "given"))
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in lines_of(tmp_path / "given")] == [line["loss"] for line in lines_of(whole)]


@pytest.mark.slow
def test_labels_are_learned_also_after_a_resume(run_here: Run, tiny_llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "labels.jsonl"
    said = {True: "It is {}.", False: "I do not know what {} is."}
    rows = [{"prompt": f"What is {a} + 3?", "completion": said[a % 2 == 0].format(a + 3), "label": a % 2 == 0}
            for a in range(10)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = run_here(
        "train", "kto", "--model", str(tiny_llama), "--data", str(data), *LAYOUT, "--lr", "1e-3", "--steps", "5",
        "--batch-size", "4", "--set", "validation.holdout=2", "--set", "training.dp=2", "--run-dir",
        str(tmp_path / "whole"), "--set", "run.checkpoint_every=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, part = lines_of(tmp_path / "whole"), cut_after(3, tmp_path / "whole", tmp_path / "part")
    assert whole[0]["loss"] == pytest.approx(0.5, abs=1e-3)  # the policy is the reference
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert whole[-1]["loss"] < 0.2
    assert whole[-1]["rewards/chosen"] > whole[-1]["rewards/rejected"] + 1
    assert all(line["good"] + line["bad"] == pytest.approx(4) for line in whole)
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, whole)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "by"), [("megatron", "source"), ("dtensor", "source"), ("dtensor", "field")])
def test_each_source_of_texts_is_learned_from_its_teacher(
    run_here: Run, tiny_llama: Path, tmp_path: Path, backend: str, by: str
) -> None:
    """Teachers take turns in the same processes; the first step has all rows of both sources."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teachers, sources = {}, {"sums": ["one two three", "four five"], "words": ["a b c d", "e f", "g h i"]}
    for seed, (name, rows) in enumerate(sources.items(), 5):
        teachers[name] = write_tiny_family(tmp_path / f"teacher-{name}", seed=seed)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    data = ", ".join(f"{{name: {tmp_path / name}.jsonl}}" for name in sources)
    owners = ", ".join(
        f"{{model: {teachers[name]}, sources: ['{tmp_path / name}.jsonl']}}" for name in sorted(sources, reverse=True)
    )
    run, field = tmp_path / "run", ()
    if by == "field":
        rows = [{"text": text, "about": {"kind": name}} for name, texts in sources.items() for text in texts]
        (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data, field = f"{{name: {tmp_path}/all.jsonl}}", ("--set", "teacher.field=about.kind")
        owners = f"{{model: {teachers['sums']}, sources: ['*']}}, {{model: {teachers['words']}, sources: [words]}}"
    done = run_here(
        "train", "distill", "--model", str(tiny_llama), "--set", f"data.sources=[{data}]", "--set",
        f"teacher.models=[{owners}]", *field, *LAYOUT, "--lr", "1e-3", "--steps", "3", "--batch-size", "5",
        "--backend", backend, "--set", "distillation.top_k=512", "--set", "training.dp=1", "--run-dir", str(run),
        "--set", "run.checkpoint_every=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines, part = lines_of(run), cut_after(2, run, tmp_path / "part")
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    policy = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    divergences = []
    for name, rows in sources.items():
        teacher = AutoModelForCausalLM.from_pretrained(teachers[name], dtype=torch.float64)
        for text in rows:
            ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
            with torch.no_grad():
                theirs, ours = (model(ids).logits[0, :-1].log_softmax(-1) for model in (teacher, policy))
            divergences += (theirs.exp() * (theirs - ours)).sum(-1).tolist()
    assert lines[0]["loss"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-5)
    if by == "field":
        done = run_here(
            "train", "distill", "--model", str(tiny_llama), "--data", str(tmp_path / "all.jsonl"), *field, *LAYOUT,
            "--set", f"teacher.models=[{{model: {teachers['words']}, sources: [words]}}]", "--dry-run",
        )  # fmt: skip
        assert done.returncode == 2
        assert "line 1: no teacher of teacher.models has about.kind = 'sums'" in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", pytest.param("dtensor", marks=pytest.mark.guard)])
def test_a_teacher_is_learned_from_on_texts(
    run_here: Run, tiny_llama: Path, tiny_llama_tied: Path, pairs: Path, tmp_path: Path, backend: str
) -> None:
    """Over the whole vocabulary, with all rows in each batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = run_here(
        "train", "distill", "--model", str(tiny_llama), "--teacher", str(tiny_llama_tied), "--data", str(pairs),
        "--answer-field", "chosen", *LAYOUT, "--lr", "1e-3", "--steps", "3", "--batch-size", "9", "--backend", backend,
        "--set", "distillation.top_k=512", "--set", "training.dp=1", "--run-dir", str(tmp_path / "run"),
        "--set", "run.checkpoint_every=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines, part = lines_of(tmp_path / "run"), cut_after(2, tmp_path / "run", tmp_path / "part")
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    models = [AutoModelForCausalLM.from_pretrained(one, dtype=torch.float64) for one in (tiny_llama_tied, tiny_llama)]
    divergences = []
    for row in map(json.loads, pairs.read_text().splitlines()):
        user = [{"role": "user", "content": row["prompt"]}]
        before = str(tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True))
        prompt, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, f"{row['chosen']}<|im_end|>")
        )
        with torch.no_grad():
            teacher, policy = (
                one(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                for one in models
            )
        divergences += (teacher.exp() * (teacher - policy)).sum(-1).tolist()
    assert lines[0]["loss"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-5)
    assert lines[0]["top_mass"] == pytest.approx(1)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", pytest.param("dtensor", marks=pytest.mark.guard)])
def test_a_model_learns_from_an_average_of_its_earlier_weights_also_when_it_is_resumed(
    run_here: Run, tiny_llama: Path, texts: Path, tmp_path: Path, backend: str
) -> None:
    run = tmp_path / "run"
    own = ("policy=true", "update_every=2", "update_rate=0.5")
    done = run_here(
        "train", "distill", "--model", str(tiny_llama), "--data", str(texts), *LAYOUT, "--lr", "3e-3", "--steps", "5",
        "--batch-size", "4", "--backend", backend, "--set", "distillation.top_k=512", "--set", "training.dp=2",
        *(part for key in own for part in ("--set", f"teacher.{key}")), "--set", "distillation.sft_weight=1",
        "--run-dir", str(run), "--set", "run.checkpoint_every=3", "--max-length", "96",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines, part = lines_of(run), cut_after(3, run, tmp_path / "part")
    assert lines[0]["top_kl"] == pytest.approx(0, abs=1e-6)  # the teacher is the policy
    assert all(line["top_kl"] > 1e-4 for line in lines[1:])
    assert lines[2]["top_kl"] < lines[1]["top_kl"] * 4  # updated from steps 1 and 2
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["teacher"], manifest["plan"]["teacher"]) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_teacher_with_another_tokenizer_is_learned_from_on_texts(
    run_here: Run, tiny_llama: Path, tmp_path: Path, backend: str
) -> None:
    teacher = write_tiny_family(tmp_path / "teacher", seed=5, num_hidden_layers=3)
    by_words(teacher)
    data, run = tmp_path / "texts.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*CORPUS[:3], CORPUS[0][:20], CORPUS[2][9:]]))
    own = ("--set", "teacher.own_tokenizer=true")
    command = (
        "train", "distill", "--model", str(tiny_llama), "--teacher", str(teacher), *LAYOUT, "--lr", "1e-3",
        "--batch-size", "4", "--backend", backend, "--set", "training.dp=1",
    )  # fmt: skip
    done = run_here(
        *command, *own, "--data", str(data), "--steps", "6", "--set", "run.checkpoint_every=3", "--run-dir", str(run),
        "--set", "distillation.top_k=512", "--max-length", "64", "--set", "data.too_long=cut",
        "--set", "validation.holdout=1",
        "--set", "validation.at_end=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines, part = lines_of(run), cut_after(3, run, tmp_path / "part")
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]
    assert all(0.5 < line["aligned"] <= 1 for line in lines)
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    assert lines[-1]["validation"]["top_kl"] > 0

    done = run_here(*command, "--data", str(data), "--dry-run")
    assert done.returncode == 2
    assert "teacher.own_tokenizer=true" in " ".join(done.stderr.split())
    data.write_text(json.dumps({"prompt": "one", "completion": "two"}) + "\n")
    done = run_here(*command, *own, "--data", str(data), "--dry-run")
    assert done.returncode == 2
    assert "a teacher with its own tokenizer would read another text" in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", pytest.param("dtensor", marks=pytest.mark.guard)])
def test_teachers_with_tokenizers_of_different_sizes_divide_the_texts_by_weight(
    run_here: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """One source has three teachers: two with their own tokenizer, and one with the policy's, which alone reads the
    chats of the other. The first loss is transformers' in float64, and a resume is exact."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = write_tiny_family(tmp_path / "words", seed=5, num_hidden_layers=3)
    same = write_tiny_family(tmp_path / "same", seed=6, num_hidden_layers=3)
    small = write_tiny_family(tmp_path / "small", seed=7, vocab_size=320)
    by_words(words)
    by_bytes(small, 300)
    texts, chats, run = tmp_path / "texts.jsonl", tmp_path / "chats.jsonl", tmp_path / "run"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS[:3]))
    chats.write_text("".join(json.dumps({"prompt": text[:9], "completion": text[9:]}) + "\n" for text in CORPUS[:3]))
    own = f"own_tokenizer: true, sources: ['{texts}']"
    listed = f"[{{model: {words}, weight: 3, {own}}}, {{model: {same}}}, {{model: {small}, weight: 0.5, {own}}}]"
    seen: list[TextGroup] = []
    train_on = Loop.train_on

    def recorded(loop: Loop, batch: Any) -> Any:
        seen.extend(replace(group, columns=fetch(group.columns)) for group in batch.groups if len(seen) < 6)
        return train_on(loop, batch)

    monkeypatch.setattr(Loop, "train_on", recorded)
    done = run_here(
        "train", "distill", "--model", str(tiny_llama), *LAYOUT, "--lr", "1e-3", "--batch-size", "6", "--backend",
        backend, "--set", "training.dp=1", "--set", f"data.sources=[{{name: {texts}}}, {{name: {chats}}}]", "--set",
        f"teacher.models={listed}", "--set", "teacher.mix=divergences", "--set", "distillation.top_k=16", "--steps",
        "4", "--set", "run.checkpoint_every=2", "--set", "distillation.forward_share=0.7", "--run-dir", str(run),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{small}, own tokenizer, weight 0.5" in done.stderr.replace("\n", "").replace("  ", "")
    policy, *teachers = (
        AutoModelForCausalLM.from_pretrained(place, dtype="float64") for place in (tiny_llama, words, same, small)
    )
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (tiny_llama, words, small)]
    projections = {2 * place: Projection.between(tokenizers[0], theirs) for place, theirs in enumerate(tokenizers[1:])}
    divergence, tokens = 0.0, 0
    for group in seen[:6]:
        columns: Any = group.columns
        kept = torch.from_numpy(columns.loss_mask_T[columns.slice(0)][1:])
        tokens += int(kept.sum())
        weights = {0: 3.0, 1: 1.0, 2: 0.5} if group.row.source == str(texts) else {1: 1.0}
        assert [*group.for_teachers] == [number for number in (0, 2) if number in weights]
        with torch.no_grad():
            ours = logits_of(policy, columns, 0)
            for number, weight in weights.items():
                if number == 1:
                    one = of_tokens(ours[kept], logits_of(teachers[1], columns, 0)[kept], 16, 0.7)
                else:
                    sample = 1 + [0, 2].index(number)
                    chunk_T = columns.extra_T[chunk_column(number)]
                    chunk_s, chunk_t = (torch.from_numpy(chunk_T[columns.slice(n)][1:]) for n in (0, sample))
                    theirs = logits_of(teachers[number], columns, sample)
                    one = of_chunks(ours, theirs, projections[number], chunk_s, chunk_t, 16, 0.7)
                divergence += weight / sum(weights.values()) * float(one)
    lines, part = lines_of(run), cut_after(2, run, tmp_path / "part")
    assert lines[0]["loss"] == pytest.approx(divergence / tokens, rel=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"]
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "adapters"),
    [pytest.param("megatron", 0, marks=pytest.mark.guard), ("dtensor", 0), ("megatron", 4), ("dtensor", 4)],
)
def test_a_reward_model_is_trained_exported_and_scores_as_in_transformers(
    run_here: Run, tiny_llama: Path, pairs: Path, tmp_path: Path, backend: str, adapters: int
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    whole = tmp_path / "whole"
    done = run_here(
        "train", "rm", "--model", str(tiny_llama), "--data", str(pairs), *LAYOUT, "--lr", "1e-3", "--backend",
        backend, "--batch-size", "3", "--run-dir", str(whole), "--steps", "4", "--set", "run.checkpoint_every=2",
        "--set", "training.dp=1", "--set", "validation.holdout=2", "--set", "validation.at_end=true",
        *(("--lora", str(adapters)) if adapters else ()),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    part, lines = cut_after(2, whole, tmp_path / "part"), lines_of(whole)
    assert [lines[0]["rewards/margins"], lines[0]["rewards/accuracies"]] == [0, 0]  # the head begins at 0
    assert lines[-1]["loss"] < 0.6
    assert lines[-1]["validation"]["rewards/accuracies"] == 1
    assert {"entropy", "logps/chosen"}.isdisjoint(lines[-1])
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines)]
    assert "scores texts and writes none" in run_here("generate", "--run-dir", str(whole), "--prompt", "x").stderr
    exported = tmp_path / "exported"
    done = run_here("convert", "megatron-to-hf", str(whole), str(exported))
    assert done.returncode == 0, done.stderr

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    texts, prompts = [row[name] for row in rows for name in ("chosen", "rejected")], [row for row in rows for _ in "12"]
    expected = []
    for text, row in zip(texts, prompts, strict=True):
        said = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": text}]
        written = str(tokenizer.apply_chat_template(said, tokenize=False)).rstrip()
        tokens = tokenizer(written, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            expected.append(model(**tokens).logits.item())
    assert min(expected[0::2]) > max(expected[1::2])
    found = ModelScorer(f"model:{exported}").score_all(
        texts, [PromptRow(place, "", row["prompt"], None) for place, row in enumerate(prompts)]
    )
    assert found == pytest.approx(expected, abs=1e-5)  # in batches, and one by one
    run, length = tmp_path / "grpo", tmp_path / "length.py"
    length.write_text("def shorter(completion):\n    return -len(completion) / 100\n")
    wanted = (
        "train", "grpo", "--model", str(tiny_llama), "--data", str(pairs), *LAYOUT, "--backend", backend, "--prompts",
        "2", "--generations", "4", "--max-new-tokens", "6", "--steps", "2", "--set", "run.checkpoint_every=1",
        "--set", "validation.holdout=1", "--set", "validation.at_end=true", "--set", "generation.threads=1",
    )  # fmt: skip
    done = run_here(*wanted, "--reward", f"model:{exported}", "--reward", f"{length}:shorter", "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    samples = [json.loads(line) for line in (run / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    again = ModelScorer(f"model:{exported}").score_all(
        [one["completion"] for one in samples], [PromptRow(0, "", one["prompt"], None) for one in samples]
    )
    assert [one["terms"]["exported"] for one in samples] == pytest.approx(again, abs=1e-4)
    assert (run / "logs" / "reward-model-0.log").exists()
    assert "exported" in lines_of(run)[0]["reward_terms"]
    part = cut_after(1, run, tmp_path / "part-of-grpo")
    done = run_here("train", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    assert [*map(without_timing, lines_of(part))] == [*map(without_timing, lines_of(run))]
    refused = run_here(*wanted, "--reward", f"model:{tiny_llama}")
    assert (refused.returncode, "is not a reward model, but LlamaForCausalLM" in refused.stderr) == (2, True)


def test_a_dry_run_shows_the_text_and_what_has_a_loss(
    run_here: Run, tiny_llama: Path, texts: Path, tmp_path: Path
) -> None:
    wanted = ("train", "sft", "--model", str(tiny_llama), "--data", str(texts), *LAYOUT, "--dry-run")
    shown = " ".join(run_here(*wanted).stdout.split())
    assert "It is 3.<|im_end|>" in shown
    assert re.search(r"texts.jsonl, line 1, \d+ tokens, \d of them with a loss", shown)
    assert "vllm" not in shown
    long = run_here(*wanted, "--max-length", "20")
    assert long.returncode == 2
    assert "the text has" in long.stderr
    assert run_here(*wanted, "--max-length", "20", "--set", "data.too_long=drop").returncode == 0
    none = run_here(*wanted, "--max-length", "4", "--set", "data.too_long=drop")
    assert none.returncode == 2
    assert "Every text is longer than --max-length." in none.stderr

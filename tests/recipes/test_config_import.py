"""`rlctl config import`, and NeMo-RL's overrides of `rlctl train`, as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl.recipes.nemo_rl.recipe import import_recipe
from support.commands import rlctl

RECIPES = Path(__file__).parents[1] / "recipes" / "nemo_rl"
FORM = str(RECIPES / "megatron_form.yaml")


def test_a_report_has_counts_first_and_then_what_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"defaults: {FORM}\ngrpo: {{ malformed_thinking_advantage: 2, key_of_tomorrow: 3 }}\n")
    code, out, _ = rlctl(capsys, "config", "import", "--report", str(path))
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("r.yaml: ")
    assert "1 not yet, 1 not known, 2 changed" in lines[0]
    assert lines[1].startswith("rlctl cannot run this yet")
    assert lines[2].startswith("  grpo.malformed_thinking_advantage = 2: ")
    assert lines[4].startswith("  grpo.key_of_tomorrow = 3: ")
    assert "policy.model_name" not in out
    assert len(lines) <= 17
    said = rlctl(capsys, "config", "validate", "--config", str(path))[2]
    assert "left out: grpo.key_of_tomorrow = 3: rlctl does not know this key" in said


def test_headings_have_colours_at_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, out, _ = rlctl(capsys, "config", "import", "--all", FORM)
    assert "\x1b[33mDifferent in rlctl:\x1b[0m" in out
    assert "\nMapped keys:\n" in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in rlctl(capsys, "config", "import", "--all", FORM)[1]


def test_all_reports_every_key_by_section_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, "config", "import", "--all", FORM)
    assert code == 0
    assert "  policy.model_name = Qwen/Qwen2.5-7B-Instruct: model.name: Qwen/Qwen2.5-7B-Instruct" in out
    mapped = out.partition("Mapped keys:\n")[2].partition("\nKeys without a counterpart")[0]
    sections = [line.strip().partition(".")[0] for line in mapped.splitlines()]
    assert sections == sorted(sections)
    assert all(f"\n  {entry.key} = " in out for entry in import_recipe(Path(FORM)).entries)


def test_what_is_written_comes_without_the_report_on_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = rlctl(capsys, "config", "import", FORM)
    assert code == 0
    assert err.startswith("megatron_form.yaml: ")
    mine = tmp_path / "mine.yaml"
    mine.write_text(out)
    assert rlctl(capsys, "config", "validate", "--config", str(mine))[0] == 0


def test_the_object_of_json_has_counts_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = rlctl(capsys, "config", "import", "--json", FORM)
    found = json.loads(out)
    assert sum(found["counts"].values()) == len(found["keys"])
    assert found["unsupported"] == []


def test_a_recipe_that_rlctl_does_not_run_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("distillation: { max_num_steps: 3 }\npolicy: { model_name: x/y, train_global_batch_size: 32 }\n")
    code, out, err = rlctl(capsys, "config", "import", str(path))
    assert code == 0
    assert "algorithm" not in out
    code, out, err = rlctl(capsys, "train", "grpo", "--config", str(path), "--dry-run", "--allow-differences")
    assert (code, out) == (2, "")
    assert "distills and names no teacher" in err
    assert "--allow-differences" not in err
    path.write_text(path.read_text() + "loss_fn: { token_level_loss: true }\ncluster: { num_nodes: 0 }\n")
    code, out, _ = rlctl(capsys, "config", "import", "--all", str(path))
    assert (code, "\nrlctl cannot run this yet:\n" in out, "--allow-differences" in out) == (0, True, False)
    _, _, err = rlctl(capsys, "config", "import", str(path))
    assert "distills and names no teacher" in err
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: { steps: 3 }\n", "rlctl YAML"),
        ("extends: laptop\ntraining.tp: 2\n", "rlctl YAML"),
        ("other_trainer: { rollout: { n: 8 } }\n", "rlctl has no section other_trainer."),
        ("data: { train_files: x }\ntrainer: { nnodes: 1 }\n", "rlctl has no section trainer."),
        ("1: 2\n", "rlctl has no section 1."),
        ("", "is empty"),
        ("# a comment\n", "is empty"),
    ],
)
def test_a_file_that_is_no_recipe_is_told_what_it_is(
    text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    code, out, err = rlctl(capsys, "config", "import", str(path))
    assert (code, out) == (2, "")
    assert said in err
    assert ("rlctl YAML" in err) == (said == "rlctl YAML")


def test_a_missing_file_of_defaults_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("defaults: ../grpo_math_1B.yaml\n")
    code, _, err = rlctl(capsys, "config", "import", str(path))
    assert code == 2
    assert "builds on ../grpo_math_1B.yaml" in err


def test_a_run_stops_with_what_cannot_be_run_and_goes_on_when_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_llama: Path
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "2 + 3?", "answer": "5"}\n' * 4)
    path = tmp_path / "r.yaml"
    steps = "num_prompts_per_step: 4, max_num_steps: 2"
    path.write_text(f"grpo: {{ malformed_thinking_advantage: 2, {steps} }}\npolicy: {{}}\n")
    more = ["grpo.num_generations_per_prompt=4", f"policy.model_name={tiny_llama}", f"data.name={data}"]
    run = ["train", "grpo", "--config", str(path), "--gpu", "cpu", "--reward", "exact-match", "--dry-run", *more]
    code, _, err = rlctl(capsys, *run)
    assert code == 2
    assert "grpo.malformed_thinking_advantage = 2" in err
    code, out, err = rlctl(capsys, *run, "--allow-differences")
    assert code == 0, err
    assert "left out: grpo.malformed_thinking_advantage = 2" in " ".join(out.split())
    assert " ".join(out.split()).count("policy.model_name is rlctl's model.name") == 1


def test_a_dry_run_shows_first_what_differs_and_names_the_recipe_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "a-folder-with-a-name-that-nobody-wants-to-read-66-times"
    folder.mkdir()
    path = folder / "recipe.yaml"
    path.write_text(f"defaults: {FORM}\ngrpo: {{ key_of_tomorrow: 3 }}\n")
    code, out, err = rlctl(capsys, "train", "--config", str(path), "--dry-run", "--gpu", "h100")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "  differs from the file"
    assert "left out: grpo.key_of_tomorrow = 3" in lines[1]
    assert out.index("key_of_tomorrow") < out.index("training    megatron")
    assert out.count(folder.name) == 1
    assert re.search(r"^    batch\.prompts +\d+ +grpo\.num_prompts_per_step$", out, re.MULTILINE)
    assert out.count("key_of_tomorrow") == 1

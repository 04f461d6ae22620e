"""The files in `examples/` do what their page says, and those that a repository's services read can be read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from rlctl.config.load import resolve
from rlctl.data.prompt_rows import PromptRow
from rlctl.envs.user_function import user_scorer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_own_data_fits_its_reward() -> None:
    lines = (EXAMPLES / "own_data" / "questions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 48
    scorer = user_scorer(f"{EXAMPLES / 'own_data' / 'rewards.py'}:brief")
    for number, fields in enumerate(rows):
        row = PromptRow(number, f"line {number + 1}", fields["question"], fields["answer"], fields)
        assert scorer(f"It is {fields['answer']}.", row) == pytest.approx(0.97)
        assert scorer("no idea", row) == pytest.approx(-0.02)


@pytest.mark.parametrize(
    ("completion", "reward"), [("so 1,200 - 30 = 1,170", 1.0), ("The answer is 1170.0", 1.0), ("1171", 0.0), ("", 0.0)]
)
def test_the_reward_of_gsm8k_reads_the_last_number(completion: str, reward: float) -> None:
    scorer = user_scorer(f"{EXAMPLES / 'gsm8k' / 'rewards.py'}:right")
    row = PromptRow(0, "row 1", "question", "She has 1,200 and spends 30.\n#### 1,170")
    assert scorer(completion, row) == reward


def test_the_configuration_of_gsm8k_is_valid() -> None:
    config = resolve("1node", [EXAMPLES / "gsm8k" / "gsm8k.yaml"], environment={}).config
    assert (config.data.name, config.data.prompt_field) == ("openai/gsm8k:main", "question")


def test_the_script_for_two_nodes_is_a_shell_script_with_known_flags() -> None:
    script = EXAMPLES / "two_nodes" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = script.read_text()
    from rlctl.cli import load_command

    for name, path in (("train", ["grpo"]), ("doctor", [])):
        line = next(line for line in text.splitlines() if f"rlctl {name}" in line)
        command = load_command(name)
        for child in path:
            command = command.commands[child]
        known = {flag for parameter in command.params for flag in parameter.opts}
        assert {word for word in line.split() if word.startswith("--")} <= known


def test_the_files_that_services_read_are_yaml() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["checks"]["steps"] if "run" in step] == [".ci/run"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)
    cluster = yaml.safe_load((EXAMPLES / "kubernetes" / "raycluster.yaml").read_text())
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert head["template"] == workers["template"]  # two equal nodes, as the presets expect
    assert {"shared", "memory"} == {one["name"] for one in head["template"]["spec"]["volumes"]}

"""verl's scripts, YAML files and overrides: which keys are known, and what the commonest become."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.load import Resolved
from rlctl.errors import ConfigError
from rlctl.methods.configuration import resolve
from rlctl.recipes.verl.recipe import import_recipe
from rlctl.recipes.verl.script import command_line
from support.commands import rlctl

KEYS = Path(__file__).parent / "keys" / "verl.csv"
"""Each key of verl's example scripts of `main_ppo` on FSDP and Megatron with vLLM (162 scripts, commits b178a3cd of
January and 1dda039b of August 2026), how often it is set there, and a value."""
SFT_KEYS = KEYS.with_name("verl_sft.csv")
"""The same of verl's scripts for its SFT trainers (28 of the same commits)."""
SCRIPT = r"""
set -xeuo pipefail
MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
prompt=$((1024 * 1))
files="['$PWD/gsm8k/train.parquet', 'math/train.parquet']"
LAUNCH=(python3)
if [ "${DEVICE:-gpu}" = gpu ]; then LAUNCH=(uv run --frozen python3); fi
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.002
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
)
mkdir -p logs
"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="$files" data.val_files=math/test.parquet data.train_batch_size=1024 \
    data.max_prompt_length=$prompt data.max_response_length=512 data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" "${ACTOR[@]}" +actor_rollout_ref.rollout.n=5 \
    trainer.logger='["console","wandb"]' trainer.test_freq=5 trainer.total_epochs=15 "$@" 2>&1 | tee logs/run.log
"""

SFT_SCRIPT = """
nproc=$1; save=$2; shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info \\
    data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=4 optim.lr=1e-4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \\
    model.lora_rank=32 model.lora_alpha=16 trainer.total_training_steps=50 trainer.logger=console $@
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run_qwen2-7b_math_megatron.sh"
    path.write_text(SCRIPT)
    return path


def resolved(path: Path, *overrides: str) -> Resolved:
    return resolve(files=[path], environment={}, overrides=overrides)


@pytest.mark.parametrize(("keys", "method", "least"), [(KEYS, None, 400), (SFT_KEYS, "sft", 100)])
def test_nine_in_ten_keys_of_the_examples_are_mapped_or_have_a_reason(
    keys: Path, method: str | None, least: int
) -> None:
    rows = list(csv.DictReader(keys.open()))
    assert len(rows) > least
    without_reason = []
    for row in rows:
        value = row["value"] or "null"
        try:
            entries = import_recipe(None, [f"++{row['key']}={value}"], method).entries
        except ConfigError:
            without_reason.append(row)
            continue
        if any(entry.status == "not known" or not entry.note for entry in entries):
            without_reason.append(row)
    assert len(without_reason) <= 0.1 * len(rows), [row["key"] for row in without_reason]
    assert sum(int(row["uses"]) for row in without_reason) <= 0.01 * sum(int(row["uses"]) for row in rows)


def test_a_script_is_read_as_bash_reads_it_and_starts_nothing(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = command_line(script)
    assert line.module == "main_ppo"
    assert f"data.train_files=['{Path.cwd()}/gsm8k/train.parquet', 'math/train.parquet']" in line.overrides
    assert "actor_rollout_ref.actor.kl_loss_coef=0.002" in line.overrides
    monkeypatch.setenv("MODEL", "mine")
    assert "actor_rollout_ref.model.path=mine" in command_line(script).overrides
    other = tmp_path / "touch.sh"
    other.write_text(f"echo made > {tmp_path}/made\n/usr/bin/touch {tmp_path}/made\ntouch {tmp_path}/made\n")
    with pytest.raises(ConfigError, match="starts no trainer of verl"):
        command_line(other)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ([], "dtensor"),
        (["actor_rollout_ref.actor.strategy=fsdp2"], "dtensor"),
        (["actor_rollout_ref.actor.strategy=megatron"], "megatron"),
        (["--config-name=ppo_megatron_trainer"], "megatron"),
    ],
)
def test_a_script_keeps_its_training_engine(given: list[str], backend: str, tmp_path: Path) -> None:
    """verl 0.9.1's ppo_trainer.yaml takes FSDP (`strategy: fsdp` of config/actor/dp_actor.yaml), and
    ppo_megatron_trainer.yaml Megatron."""
    path = tmp_path / "run.sh"
    keys = "algorithm.adv_estimator=grpo data.train_files=a.parquet data.val_files=['b.parquet','c.parquet']"
    path.write_text(f"python3 -m verl.trainer.main_ppo {' '.join(given)} {keys} actor_rollout_ref.model.path=a/b\n")
    found = resolved(path)
    assert found.config.training.backend == backend
    assert found.config.validation.data.name == "b.parquet"
    assert any("b.parquet is used and c.parquet is not" in note for note in found.notes)


def test_keys_of_a_script_become_those_that_mean_the_same(script: Path) -> None:
    """By verl's documentation a batch counts prompts, mini-batches divide it, and low_var_kl is k3 within 10."""
    config: Any = resolved(script).config
    assert (config.run.algorithm, config.training.backend, config.training.tp) == ("grpo", "megatron", 2)
    assert (config.batch.prompts, config.batch.generations, config.batch.optimizer_steps) == (1024, 5, 4)
    assert (config.model.max_length, config.generation.max_new_tokens) == (1536, 512)
    loss = config.loss
    assert (loss.kl_coefficient, loss.kl_estimator, loss.kl_cap, loss.kl_in) == (0.002, "k3", 10.0, "loss")
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.importance_correction) == (0.2, 0.2, 3.0, "off")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-6, 0.01)
    assert [source.name for source in config.data.sources][1] == "math/train.parquet"
    assert (config.validation.data.name, config.validation.every, config.validation.at_start) == (
        "math/test.parquet",
        5,
        True,
    )
    assert (config.run.epochs, config.run.loggers, config.data.too_long) == (15, ("wandb",), "drop")
    assert [term.name for term in config.reward.terms] == ["math-verify"]


def test_teachers_with_a_key_are_those_of_rows_with_it(script: Path) -> None:
    """verl leaves its default `teacher_model` out where others are listed."""
    place = "+distillation.teacher_models."
    keys = ("enabled=True", "teacher_key=kind", "teacher_models.teacher_model.model_path=org/default")
    several = [f"{place}{name}.{key}" for name, model in (("math", "one"), ("code", "two"))
               for key in (f"model_path=org/{model}", f"key=of-{name}")]  # fmt: skip
    teacher = resolved(script, *(f"+distillation.{key}" for key in keys), *several).config.teacher
    assert teacher.field == "kind"
    assert [(str(entry.model), entry.sources) for entry in teacher.models] == [
        ("org/one", ("of-math",)), ("org/two", ("of-code",)),
    ]  # fmt: skip
    alone = resolved(script, *(f"+distillation.{key}" for key in keys)).config.teacher
    assert (str(alone.model), alone.models, alone.field) == ("org/default", (), None)


@pytest.mark.parametrize("loss", ["sapo", "cispo"])
def test_bounds_that_a_loss_lacks_are_left_out(script: Path, loss: str) -> None:
    mode = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
    bounds = ("actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio_c=4")
    config: Any = resolved(script, mode, *bounds).config
    assert config.run.algorithm == loss
    assert hasattr(config.loss, "clip_high") == (loss == "cispo")
    assert not hasattr(config.loss, "dual_clip")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("algorithm.adv_estimator=reinforce_plus_plus", "run.algorithm", "reinforce++"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "run.algorithm", "gspo"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "loss.level", "sequence"),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "loss.clip_high", 0.3),
        ("custom_reward_function.path=mine.py", "reward.terms.name", "mine.py:compute_score"),
        ("trainer.total_training_steps=7", "run.steps", 7),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=3", "vllm.max_logprobs", 3),
    ],
)
def test_overrides_of_the_command_line_are_stronger(script: Path, override: str, key: str, value: Any) -> None:
    config: Any = resolved(script, override).config.model_dump()
    if key == "reward.terms.name":
        assert config["reward"]["terms"][0]["name"] == value
        return
    section, name = key.split(".")
    assert config[section][name] == value


def test_what_cannot_run_stops_with_the_key(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rlctl(capsys, "train", "--config", str(script), "algorithm.adv_estimator=remax", "--dry-run")
    assert code == 2
    assert "algorithm.adv_estimator = remax: rlctl knows grpo" in err
    code, _, err = rlctl(capsys, "config", "validate", "--config", str(script), "--set", "run.nothing=1")
    assert code == 2


def test_a_yaml_file_is_read_with_its_references(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("""
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data: {train_batch_size: 64, max_prompt_length: 100, max_response_length: 28}
algorithm: {adv_estimator: grpo, use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.01}}
actor_rollout_ref:
  model: {path: own/model}
  actor: {ppo_mini_batch_size: 64, optim: {lr: 2e-6}}
  rollout: {n: 4, response_length: "${data.max_response_length}", prompt_length: "${nothing.there}"}
""")
    config: Any = resolved(path, "data.train_batch_size=128").config
    assert (config.batch.prompts, config.batch.optimizer_steps, config.model.max_length) == (128, 2, 128)
    assert (config.loss.kl_in, config.loss.kl_coefficient, config.loss.kl_estimator) == ("reward", 0.01, "k1")


def test_a_script_of_texts_becomes_a_run_of_sft(tmp_path: Path) -> None:
    """By verl's `sft_trainer.yaml` a batch has 256 rows, and the schedule is a cosine after a tenth of
    the steps."""
    path = tmp_path / "sft.sh"
    path.write_text(SFT_SCRIPT)
    config: Any = resolved(path, "optim.lr=2e-4", "model.lora_rank=8", "+model.lora.dropout=0.1").config
    assert config.training.lora.dropout == 0.1
    assert (config.run.algorithm, config.run.steps, config.batch.prompts) == ("sft", 50, 256)
    assert (config.data.name, config.data.prompt_field) == ("gsm8k/train.parquet", "extra_info.question")
    assert config.data.answer_field == "extra_info.answer"
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-4, 0.01)
    assert (config.scheduler.decay, config.scheduler.warmup_steps) == ("cosine", 5)
    assert (config.training.lora.rank, config.training.lora.alpha) == (8, 16)
    assert (config.validation.data.name, config.validation.at_end) == ("gsm8k/test.parquet", True)
    with pytest.raises(ConfigError, match=r"unknown key `optim\.lrr`"):
        resolved(path, "optim.lrr=1")
    newer = tmp_path / "newer.yaml"
    newer.write_text("""
data: {train_files: a.parquet, messages_key: messages, max_length: 2048, truncation: left}
model: {path: own/model}
engine: {strategy: fsdp2, ulysses_sequence_parallel_size: 2}
optim: {lr: 1e-5}
trainer: {total_epochs: 2}
""")
    found = resolved(newer)
    config = found.config
    assert (config.run.algorithm, config.run.epochs, config.batch.prompts) == ("sft", 2, 256)
    assert (config.model.max_length, config.training.backend, config.training.cp) == (2048, "dtensor", 2)
    assert config.data.prompt_field == "prompt"


def test_tools_are_functions_or_named_with_their_classes(tmp_path: Path, script: Path) -> None:
    """A file of functions with verl's decorator names rlctl's tools, and one of classes says what to do with each."""
    (tmp_path / "tools.py").write_text("""
from verl.tools.function_tool import function_tool

@function_tool
def search(query: str) -> str: ...

@function_tool("renamed")
async def read(page: int) -> str: ...

def helper(): ...
""")
    (tmp_path / "tools.yaml").write_text("""
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema: {type: function, function: {name: calc_gsm8k_reward, description: grades}}
""")
    turns = "actor_rollout_ref.rollout.multi_turn."
    functions = [f"{turns}enable=True", f"{turns}function_tool_path={tmp_path}/tools.py"]
    config: Any = resolved(script, *functions, f"{turns}max_assistant_turns=4").config
    assert [one.rpartition(":")[2] for one in config.environment.tools] == ["search", "read"]
    assert config.environment.turns == 4
    classes = import_recipe(script, [f"{turns}enable=True", f"{turns}tool_config_path={tmp_path}/tools.yaml"])
    (line,) = classes.unsupported
    assert "calc_gsm8k_reward (verl.tools.gsm8k_tool.Gsm8kTool)" in line
    assert "--tool file.py:function" in line
    given: Any = resolve(
        files=[script], environment={}, sets=["environment.tools=[mine.py:search]"],
        overrides=[f"{turns}tool_config_path={tmp_path}/tools.yaml"],
    ).config  # fmt: skip
    assert given.environment.tools == ("mine.py:search",)


@pytest.mark.parametrize("module", ["verl.experimental.one_step_off_policy.main_ppo", "recipe.dapo.main_dapo"])
def test_trainers_of_verls_recipes_are_read(module: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m {module} --config-name=x data.train_batch_size=0 algorithm.adv_estimator=grpo "
                    "actor_rollout_ref.actor.ppo_mini_batch_size=32 async_training.require_batches=2 "
                    "async_training.trigger_parameter_sync_step=4 actor_rollout_ref.model.path=a/b\n")  # fmt: skip
    config: Any = resolved(path).config
    assert (config.batch.prompts, config.batch.optimizer_steps, config.rollouts.mode) == (256, 8, "async")

"""The first prompt of a run from another trainer's file is the one that this trainer renders."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rlctl.jobs.dry_run import dry_train
from rlctl.methods.configuration import resolve

ASKED = [{"role": "user", "content": 'Janet has 3 ducks and buys 2. How many? Let\'s think step by step and output the '
          'final answer after "####".'}]  # fmt: skip


@pytest.mark.parametrize("trainer", ["verl", "TRL"])
def test_the_first_prompt_is_what_the_trainer_renders(trainer: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Both apply the tokenizer's chat template to the messages of `prompt`, with a generation prompt."""
    row = {
        "data_source": "openai/gsm8k", "prompt": ASKED, "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 0, "split": "train"},
    }  # fmt: skip
    data = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row] * 4), data)
    (tmp_path / "score.py").write_text("""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.endswith(ground_truth))
def ends(prompts, completions, reward_model, **columns):
    ends = [graded["ground_truth"] for graded in reward_model]
    return [float(said[0]["content"].endswith(end)) for said, end in zip(completions, ends)]
""")
    if trainer == "verl":
        path = tmp_path / "run.sh"
        path.write_text(f"""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files={data} data.val_files={data} \\
    data.train_batch_size=2 data.max_prompt_length=200 data.max_response_length=24 actor_rollout_ref.rollout.n=2 \\
    actor_rollout_ref.model.path={tiny_llama} actor_rollout_ref.actor.ppo_mini_batch_size=1 \\
    custom_reward_function.path={tmp_path}/score.py custom_reward_function.name=compute_score trainer.total_epochs=1
""")
    else:
        path = tmp_path / "run.yaml"
        path.write_text(f"""
model_name_or_path: {tiny_llama}
dataset_name: {data}
reward_funcs: ["{tmp_path}/score.py:ends"]
num_generations: 2
per_device_train_batch_size: 4
max_completion_length: 24
num_train_epochs: 1
""")
    resolved = resolve(files=[path], environment={}, flags={"cluster.gpu": "cpu", "cluster.gpus_per_node": 0})
    run = dry_train(resolved, completion="5")
    assert run.first_look is not None
    prompt = run.first_look.prompts[0]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert prompt.text == tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert [trial.reward for trial in prompt.trials] == [1.0, 1.0]

"""The tokenizer and chat template that a run trained with, in the exports of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from rlctl.checkpoints.hf.tokenizer_files import replace_tokenizer
from rlctl.checkpoints.megatron.megatron_directory import RUN_TOKENIZER, MegatronDirectory, is_of_run, manifest_of
from rlctl.checkpoints.model_files import Tell
from rlctl.errors import InputError

REPLACED = ("model.tokenizer", "model.chat_template")
TIME = "model.chat_template_time"


def take_tokenizer_of_run(megatron: MegatronDirectory, directory: Path, tell: Tell) -> None:
    """Replace tokenizer and chat template of an export by the run's, if they differ from the base model's. `tell`
    receives the replacement and files that the run has not kept."""
    if not is_of_run(megatron):
        return
    try:
        config = manifest_of(megatron)["config"]
    except (InputError, KeyError):
        return
    keys = [key for key in REPLACED if config.get(key, {}).get("value")]
    kept = megatron.shards.absolute().parents[2] / RUN_TOKENIZER
    if kept.is_dir():
        replace_tokenizer(directory, kept)
        tell("tokenizer and chat template are those that the run trained with")
    elif keys:
        tell(f"without the run's {' and '.join(keys)}, which it has not kept: the base model's are in their place")
    if time := config.get(TIME, {}).get("value"):
        tell(f"the run's prompts say {time} ({TIME}); the exported chat template writes the time at which it is used")

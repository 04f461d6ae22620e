"""Copy of a run's tokenizer and chat template in its directory, for exports of its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlctl.checkpoints.hf.hf_files import read_config, read_generation
from rlctl.checkpoints.hf.tokenizer_files import names_other_class, write_tokenizer
from rlctl.checkpoints.megatron.megatron_directory import RUN_TOKENIZER
from rlctl.checkpoints.model_files import tokenizer_directory
from rlctl.data.chat import read_template
from rlctl.preparation.job import Job


def keep_tokenizer(job: Job, run: Path) -> None:
    """Write the run's tokenizer files if its tokenizer, chat template or end tokens differ from the base model's
    directory. The generation configuration lists the template's end tokens, since answers end with them."""
    model, base, kept = job.config.model, job.base_model.directory, run / RUN_TOKENIZER
    directory = base
    if model.tokenizer:
        directory = tokenizer_directory(model.tokenizer, trust_remote_code=model.trust_remote_code)
    encoder = job.prompts.encoder
    plain = names_other_class(encoder.tokenizer, directory)
    shutil.rmtree(kept, ignore_errors=True)
    generation = read_generation(base)
    listed = (generation or (read_config(base) if (base / "config.json").is_file() else {})).get("eos_token_id")
    ends = {"eos_token_id": list(encoder.stop_token_ids)} if encoder.template else {}
    lacking = set(encoder.stop_token_ids) - set(listed if isinstance(listed, list) else [listed]) if ends else set()
    if not (model.tokenizer or model.chat_template or plain or lacking):
        return
    template = read_template(model.chat_template) if model.chat_template else None
    write_tokenizer(directory, kept, template=template, plain=plain, generation=generation | ends)

"""The tokenizer and chat template that a run trains with, and those of its exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from rlctl.checkpoints.conversion.run_tokenizer import take_tokenizer_of_run
from rlctl.checkpoints.hf.hf_files import copy_companions
from rlctl.checkpoints.megatron.megatron_directory import RUN_TOKENIZER, MegatronDirectory
from rlctl.jobs.kept_tokenizer import keep_tokenizer
from rlctl.methods.configuration import resolve
from rlctl.preparation.job import Job, prepare_job
from rlctl.preparation.manifest import manifest_of
from rlctl.runs.directory import RunDirectory

OWN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [{"role": "user", "content": "a"}]


def prepared(model: Path, folder: Path, **flags: str) -> Job:
    data = folder / "q.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    scored = {"reward.terms": [{"name": "exact-match"}], "run.steps": 1, "generation.max_new_tokens": 8}
    asked = {"model.name": str(model), "data.name": str(data), "cluster.gpu": "cpu", **scored, **flags}
    return prepare_job(resolve(flags=asked, environment={}))


def exported(job: Job, folder: Path) -> tuple[Path, list[str]]:
    """Return a directory with the companions of an export of a run's step 1, and what was said."""
    run, said = RunDirectory(folder / "run"), list[str]()
    run.create()
    run.write_manifest(manifest_of(job))
    keep_tokenizer(job, run.path)
    copy_companions(job.base_model.directory, folder / "out")
    found = MegatronDirectory(run.path, run.path / "checkpoints" / "step_1" / "policy", 1)
    take_tokenizer_of_run(found, folder / "out", said.append)
    return folder / "out", said


def test_an_export_has_the_chat_template_of_the_run_and_ends_with_its_token(tiny_llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"}))
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.6}')
    job = prepared(model, tmp_path, **{"model.chat_template": OWN})
    directory, said = exported(job, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == "[user]a[assistant]"
    generation = GenerationConfig.from_pretrained(directory)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation.eos_token_id
    assert 0 in generation.eos_token_id
    assert generation.temperature == 0.6
    assert said == ["tokenizer and chat template are those that the run trained with"]
    shutil.rmtree(tmp_path / "run" / RUN_TOKENIZER)  # as older versions of rlctl left it
    found = MegatronDirectory(tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_1" / "policy", 1)
    take_tokenizer_of_run(found, directory, said.append)
    assert said[1:] == [
        "without the run's model.chat_template, which it has not kept: the base model's are in their place"
    ]


def test_an_export_ends_with_the_token_of_its_own_template(tiny_llama: Path, tmp_path: Path) -> None:
    """As base models are published that have a chat template: answers end with a token that generation_config.json
    does not list, so `generate` of transformers would never stop."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"}))
    for file in model.glob("chat_template*"):
        file.unlink()
    (model / "chat_template.jinja").write_text(OWN)
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.6}')
    directory, _ = exported(prepared(model, tmp_path), tmp_path)
    generation, tokenizer = GenerationConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert {0, tokenizer.convert_tokens_to_ids("<|im_end|>")} == {*generation.eos_token_id}
    assert generation.temperature == 0.6
    assert tokenizer.apply_chat_template(ASKED, tokenize=False) == "[user]a"


def test_a_generation_configuration_that_is_no_json_is_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    """Mistral-Small-3.2 is published with one that ends in a comma; transformers and vLLM go on without it."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (model / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2,}')
    encoder = prepared(model, tmp_path).prompts.encoder
    assert encoder.tokenizer.eos_token_id in encoder.stop_token_ids


def test_an_export_has_the_tokenizer_of_the_run(tiny_llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = OWN
    tokenizer.save_pretrained(other)
    directory, _ = exported(prepared(tiny_llama, tmp_path, **{"model.tokenizer": str(other)}), tmp_path)
    shutil.rmtree(other)
    found = AutoTokenizer.from_pretrained(directory)
    assert found.get_vocab() == tokenizer.get_vocab()
    assert found.apply_chat_template(ASKED, tokenize=False) == "[user]a"


def test_an_export_of_a_misread_tokenizer_is_read_right_by_others(tiny_llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    text, truth = "Hello  world,\n ok", Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = truth.encode(text, add_special_tokens=False).ids
    assert AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False) != ids
    directory, _ = exported(prepared(model, tmp_path), tmp_path)
    assert AutoTokenizer.from_pretrained(directory).encode(text, add_special_tokens=False) == ids


def test_a_run_keeps_no_copy_of_its_base_model_s_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    directory, said = exported(prepared(tiny_llama, tmp_path), tmp_path)
    assert not (tmp_path / "run" / RUN_TOKENIZER).exists()
    assert said == []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (tiny_llama / name).read_bytes()

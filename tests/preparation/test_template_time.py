"""The time that chat templates write: one for a run, its resumes and its evaluations."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.load import Resolved
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import InputError
from rlctl.jobs.candidates import at_one_time, candidates
from rlctl.jobs.encoded_tasks import Encoded
from rlctl.jobs.evaluate import evaluation
from rlctl.jobs.resume import resumed_job
from rlctl.methods.configuration import resolve
from rlctl.preparation import named
from rlctl.preparation.job import prepare_job
from rlctl.preparation.manifest import manifest_of
from rlctl.preparation.named import CLOCK, TIME
from rlctl.runs.directory import RunDirectory
from rlctl.runs.evaluation_file import SampleFile
from rlctl.settings.data import DataConfig, ModelConfig

MESSAGES = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEMPLATE = "{{ strftime_now('%d %b %Y %H:%M:%S') }} " + MESSAGES


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "3 + 4?", "answer": "7"}\n' * 4)
    return path


def test_a_template_writes_one_time_however_long_it_takes(tiny_llama: Path) -> None:
    def encoder(time: str | None = None) -> PromptEncoder:
        model = ModelConfig(chat_template="{{ strftime_now('%H:%M:%S.%f') }}" + MESSAGES, chat_template_time=time)
        return PromptEncoder.build(load_tokenizer(tiny_llama, model), model, DataConfig(), tiny_llama)

    row, now, then = PromptRow(0, "line 1", "?", ""), encoder(), encoder("2026-11-28T17:50:06")
    assert len({now.text(row) for _ in range(100)}) == 1
    assert then.text(row) == "17:50:06.000000?"
    assert pickle.loads(pickle.dumps(then)).text(row) == then.text(row)
    with pytest.raises(ValueError, match="no date such as 2026-11-28"):
        ModelConfig(chat_template_time="today")


def test_a_resume_keeps_the_time_of_the_start(
    tiny_llama: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(year: int) -> None:
        now = datetime(year, 2, 3, 4, 5, 6)
        monkeypatch.setattr(named, "datetime", type("Clock", (datetime,), {"now": classmethod(lambda _: now)}))

    def configured(name: str, **more: str) -> Resolved:
        flags = {"model.name": str(tiny_llama), "data.name": str(questions), "cluster.gpu": "cpu", "run.steps": 2}
        scored = {"reward.terms": [{"name": "exact-match"}], "run.dir": str(tmp_path / name)}
        return resolve(flags={**flags, **scored, **more}, environment={})

    def begun(name: str, **more: str) -> RunDirectory:
        run = RunDirectory(tmp_path / name)
        run.create()
        run.write_manifest(manifest_of(prepare_job(configured(name, **more))))
        return run

    at(2031)
    run = begun("dated", **{"model.chat_template": TEMPLATE})
    at(2032)
    asked = resolve(flags={"run.dir": str(run.path)}, environment={})
    job = resumed_job(run, asked, lambda _: None, allow_changes=False)
    assert job.prompts.text(job.prompts.prompt_at(0)) == "03 Feb 2031 04:05:06 3 + 4?"
    assert (job.config.model.chat_template_time, job.resolved.origin[TIME]) == ("2031-02-03T04:05:06", CLOCK)
    assert begun("without").manifest()["config"][TIME]["value"] is None


@pytest.mark.usefixtures("untried")
def test_samples_of_one_file_have_one_time_in_their_prompts(tiny_llama: Path, questions: Path, tmp_path: Path) -> None:
    def first_prompt(file: SampleFile, **more: str) -> tuple[str, dict[str, Any]]:
        flags = {"model.name": str(tiny_llama), "model.chat_template": TEMPLATE, "cluster.gpu": "cpu", **more}
        few = {"generation.max_new_tokens": 4}
        found = candidates([str(tiny_llama)], [], lambda _: resolve(flags={**flags, **few}, environment={}), 1)
        job = evaluation(found, [str(questions)], 1, [1], 1)
        [candidate] = at_one_time(job.candidates, file)
        encoded, task = Encoded.of(job, candidate, lambda _: None), job.tasks[0]
        settings = json.loads(json.dumps(encoded.settings(task)))
        file.begin(task.label, candidate.label, settings)
        return encoded.encoders[task.label].text(task.prompts[0]), settings

    path = tmp_path / "samples.jsonl"
    with SampleFile(path) as file:
        text, settings = first_prompt(file, **{TIME: "2024-02-29T07:08:09"})
        assert text == "29 Feb 2024 07:08:09 3 + 4?"
    with SampleFile(path) as file:
        assert first_prompt(file) == (text, settings)  # years later
    with SampleFile(path) as file, pytest.raises(InputError, match=r"chat_template_time`: '2024.* then, '2025.* now"):
        first_prompt(file, **{TIME: "2025-01-01"})

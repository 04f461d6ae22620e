"""A model with the tokens of an evaluation's prompts, and the settings that determine its samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.backends.messages import Sampling
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.model_files import Tell
from rlctl.config.user_code import MODEL
from rlctl.data.chat import PromptEncoder, load_tokenizer, template_digest
from rlctl.data.prompt_rows import PromptRow
from rlctl.jobs.candidates import Candidate
from rlctl.jobs.completion_job import CompletionJob, completion_job
from rlctl.jobs.generate import with_room
from rlctl.jobs.tasks import Task
from rlctl.preparation.named import TIME
from rlctl.rewards.reward_model_scorer import reward_digest
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes
from rlctl.rollouts.source_episodes import SourceEpisodes
from rlctl.runs.evaluation_file import SampleFile
from rlctl.settings.rewards import RewardTerm


@dataclass(frozen=True)
class Evaluation:
    """Models, tasks and numbers of an evaluation."""

    candidates: tuple[Candidate, ...]
    tasks: tuple[Task, ...]
    samples: int
    ks: tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """A model with the tokens of every prompt."""

    candidate: Candidate
    job: CompletionJob
    encoders: Mapping[str, PromptEncoder]
    prompts: Mapping[str, list[tuple[int, ...]]]
    """Tokens of each prompt by task, in the order of its rows."""
    identity: str
    play: SourceEpisodes | None = None
    """How engines play the episodes of each task; None: each prompt gets one answer."""

    @classmethod
    def of(cls, evaluation: Evaluation, candidate: Candidate, tell: Tell) -> Encoded:
        """Open the model and its tokenizer. Raises InputError for a prompt that leaves no room for an answer."""
        total = sum(len(task.rows) for task in evaluation.tasks)
        job = completion_job(candidate.resolved, evaluation.samples, candidate.checkpoint, total, tell)
        config, directory = job.config, job.model.files.directory
        tokenizer = load_tokenizer(directory, config.model)
        encoders = {
            task.label: PromptEncoder.build(tokenizer, config.model, task.data, directory) for task in evaluation.tasks
        }
        for note in dict.fromkeys(
            filter(None, [job.model.files.note, *(encoder.note for encoder in encoders.values())])
        ):
            tell(f"{candidate.label}: {note}")
        environments = {task.label: task.environment or config.environment for task in evaluation.tasks}
        firsts = [(task.label, encoders[task.label], task.prompts[0]) for task in evaluation.tasks]
        play = SourceEpisodes.of_tasks(config, environments, firsts)
        if play is not None:
            encoders |= {label: of_task.showing_tools(encoders[label]) for label, of_task in play.plays.items()}
            for line in play.describe():
                tell(f"{candidate.label}: {line}")

        for task in evaluation.tasks:
            for note in encoders[task.label].notes_on(task.prompts):
                tell(f"{candidate.label}: {note}")

        def prompt(row: PromptRow, label: str) -> tuple[int, ...]:
            of_task = play.of(label) if play else None
            encoder = encoders[label]
            return encoder.encode(row) if of_task is None else tuple(of_task.measured(row, encoder))

        prompts = {
            task.label: with_room(job, [prompt(row, task.label) for row in task.prompts], task.prompts, tell)
            for task in evaluation.tasks
        }
        weights = candidate.checkpoint
        identity = (
            hashlib.sha256(json.dumps(weights.state()["files"], sort_keys=True).encode()).hexdigest()
            if weights
            else model_fingerprint(directory, job.model.files.weights)
        )
        return cls(candidate, job, encoders, prompts, identity, play)

    def play_of(self, task: Task) -> EnvironmentEpisodes | None:
        return self.play.of(task.label) if self.play else None

    def opens_thought(self, task: Task) -> bool:
        """Return whether completions begin inside a thought."""
        return self.encoders[task.label].opens_thought

    def sampling(self, task: Task) -> Sampling:
        encoder = self.encoders[task.label]
        return Sampling.from_config(
            self.job.config.generation,
            stop=encoder.stop,
            stop_token_ids=encoder.stop_token_ids,
            never=encoder.never_sampled,
        )

    def settings(self, task: Task) -> dict[str, Any]:
        """Return the settings that determine a task's samples. The numbers of prompts and samples are left out, because
        each sample depends only on its seed, so that a file can grow."""
        data, config, sampling = task.data, self.job.config, self.sampling(task)
        template = config.model.chat_template
        return {
            "model": self.identity,
            "data": task.dataset.fingerprint(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            **({"min_p": sampling.min_p} if sampling.min_p else {}),
            "max_new_tokens": sampling.max_new_tokens,
            "max_length": config.model.max_length,
            "stop": sampling.stop,
            "seed": config.run.seed,
            "system_prompt": data.system_prompt,
            "prompt_template": data.prompt_template,
            "prompt_suffix": data.prompt_suffix,
            **({"special_tokens": kept} if (kept := data.special_tokens) != "text" else {}),
            "chat_template": template_digest(template) if template else None,
            "tokenizer": config.model.tokenizer,
            **({TIME: config.model.chat_template_time} if self._writes_time(task) else {}),
            **({"chat_template_kwargs": kwargs} if (kwargs := config.model.chat_template_kwargs) else {}),
            "scorers": [_identity_of(term) for term in task.rewards.terms] if task.rewards else [],
            "extract": task.rewards.extraction if task.rewards else None,
            **({"environment": play.manifest()} if (play := self.play_of(task)) else {}),
        }

    def _writes_time(self, task: Task) -> bool:
        scorers = task.rewards.scorers if task.rewards else ()
        return self.encoders[task.label].writes_time or any(name.startswith(MODEL) for name in scorers)

    def missing(self, task: Task, file: SampleFile, samples: int) -> list[tuple[int, int]]:
        """Return (row, sample number) of each sample that the file lacks."""
        there = file.samples(task.label, self.candidate.label)
        return [(row, sample) for row in task.rows for sample in range(samples) if (row, sample) not in there]


def _identity_of(term: RewardTerm) -> str:
    digest = reward_digest(term.name)
    return f"{term.weight:g} x {term.name}" + (f" ({digest})" if digest else "")

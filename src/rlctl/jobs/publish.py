"""Upload of a converted model to the Hugging Face hub, with a model card about its training."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.errors import InputError, RlctlError
from rlctl.models.families import sees
from rlctl.report.reported_run import ReportedRun
from rlctl.report.run_report import reported
from rlctl.runs.directory import MANIFEST, RunDirectory
from rlctl.telemetry.headline import headline

CARD = "README.md"


def require_hub(name: str) -> None:
    """Raise InputError for an invalid repository name, or if there is no hub token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"--push-to-hub {name}: {error}", "Write OWNER/NAME.") from error
    if not get_token():
        raise InputError(
            f"--push-to-hub {name}: there is no token for the Hugging Face hub.",
            "Log in with `hf auth login`, or set HF_TOKEN; the token must be allowed to write.",
        )


def publish(directory: Path, name: str, *, private: bool) -> str:
    """Upload a directory as the model `name`; return its address. Raises RlctlError if the upload fails."""
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="rlctl")
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload a model trained with rlctl")
    except (HfHubHTTPError, HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RlctlError(
            f"--push-to-hub {name}: the hub did not take it: {reason}",
            f"The model is in {directory}. Upload it later with: hf upload {name} {directory}",
        ) from error
    return str(address)


def run_of(source: Path) -> RunDirectory | None:
    """Return the run that contains a checkpoint; None: no run does."""
    places = [source, *source.absolute().parents[:3]]
    run_place = next((place for place in places if (place / MANIFEST).is_file()), None)
    return RunDirectory(run_place) if run_place else None


def write_card(directory: Path, name: str, run: RunDirectory | None) -> None:
    """Write the model card into the directory of a converted model, unless it has one."""
    path = directory / CARD
    if not path.exists():
        path.write_text(card(directory, name, run))


def card(directory: Path, name: str, run: RunDirectory | None) -> str:
    """Return the text of a model card: base model, data, settings and results of the run, and example code."""
    adapters = (directory / "adapter_config.json").exists()
    config = run.manifest()["config"] if run else {}
    values = {key: entry.get("value") for key, entry in config.items() if isinstance(entry, dict)}
    whole = _whole_class(directory)
    head: dict[str, Any] = {
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": None if whole else "text-generation",
        "base_model": values.get("model.name"),
        "datasets": [values["data.name"]] if _on_hub(values.get("data.name")) else None,
        "tags": ["rlctl", "reinforcement-learning", *filter(None, [str(values.get("run.algorithm") or "")])],
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items() if value), "---", ""]
    lines += [f"# {name.rpartition('/')[2]}", ""]
    lines += [*_story(values, run), "", "## Use", "", "```python", *_use(name, adapters, values, whole), "```", ""]
    return "\n".join(lines)


def _story(values: Mapping[str, Any], run: RunDirectory | None) -> list[str]:
    if run is None:
        return ["Converted from a Megatron checkpoint with rlctl."]
    reported = _reported(run)
    steps = f"{int(reported.lines[-1]['step']):,} steps of " if reported else ""
    lines = [
        f"{values.get('model.name')} after {steps}reinforcement learning (`{values.get('run.algorithm')}`) on "
        f"`{values.get('data.name')}`, with rlctl."
    ]
    if reported is None:
        return lines
    facts = dict((*reported.identity, *reported.facts))
    reward = headline(reported.lines)
    rows = {
        "result": reward.text() if reward else "",
        "prompts x rollouts of a step": f"{values.get('batch.prompts')} x {values.get('batch.generations')}",
        "learning rate": str(values.get("optimizer.lr")),
        "longest completion": f"{values.get('generation.max_new_tokens')} tokens",
        "machine": facts.get("machine", ""),
        "versions": facts.get("versions", ""),
    }
    lines += ["", "| | |", "|---|---|", *(f"| {label} | {text} |" for label, text in rows.items() if text)]
    if command := run.manifest().get("command"):
        lines += ["", "```sh", shlex.join(["rlctl", *map(str, command[1:])]), "```"]
    return lines


def _reported(run: RunDirectory) -> ReportedRun | None:
    try:
        return reported(run, "")
    except InputError:  # no step has finished, or the metrics are missing
        return None


def _whole_class(directory: Path) -> str | None:
    config = read_config(directory) if (directory / "config.json").exists() else {}
    return str(config["architectures"][0]) if sees(config) else None


def _use(name: str, adapters: bool, values: Mapping[str, Any], whole: str | None) -> list[str]:
    base = values.get("model.name") or name
    if whole:
        return [
            f"from transformers import AutoProcessor, {whole}",
            "",
            f'model = {whole}.from_pretrained("{name}")',
            f'processor = AutoProcessor.from_pretrained("{name}")',
        ]
    if adapters:
        return [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{base}")',
        ]
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    ]


def _on_hub(data: Any) -> bool:
    return isinstance(data, str) and data.count("/") == 1 and ":" not in data and not Path(data).exists()

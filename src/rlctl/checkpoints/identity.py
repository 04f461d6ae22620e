"""Digests of files, and of a model directory's configuration, tokenizer and weights, wherever it lies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import xxhash

from rlctl.checkpoints.hf.hf_files import COMPANIONS, NAMED_TEMPLATES, TOKENIZER

# Weights are sampled: enough to tell two models apart, and quick for hundreds of gigabytes. Other files are read whole.
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "chat_template*", f"{NAMED_TEMPLATES}/*.jinja",
    "special_tokens_map.json",
)  # fmt: skip
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
PLACES, PLACE_BYTES = 256, 1 << 12
READ_BYTES = 1 << 22


def file_digest(path: Path) -> str:
    """Hexadecimal 128-bit XXH3 digest: finds damage at the speed of the disk, and is no proof against malice."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def damaged_files(directory: Path, digests: Mapping[str, str]) -> list[str]:
    """Describe, in a sentence each, the damage to files below `directory` that were written with `digests`."""
    problems = []
    for name, expected in digests.items():
        try:
            digest = file_digest(directory / name)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if digest != expected:
            problems.append(f"{name} is not what was written")
    return problems


def model_fingerprint(directory: Path, weights: Path | None = None) -> str:
    """Return a hexadecimal digest of the model: each weight file's name, size and 16 samples of 64 KiB. `weights`:
    another directory for these."""
    digest = hashlib.sha256()
    # without tokenizer.json, vocabulary and merges decide
    others = () if (directory / "tokenizer.json").is_file() else TOKENIZER
    _add_small_files(digest, directory, (*SMALL_FILES, *others))
    weights = weights or directory
    for path in sorted([*weights.glob("*.safetensors"), *weights.glob("*.distcp")]):
        size = path.stat().st_size
        with path.open("rb") as file:
            for index in range(SAMPLES):
                file.seek(index * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
                _add(digest, f"{path.name}/{size}", file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def source_identity(directory: Path) -> str:
    """Return a hexadecimal digest of a converted source: companion contents and weight file identity. Hub cache files
    are named by content; others count by place, size, time and samples: copies and images keep times."""
    digest = hashlib.sha256()
    _add_small_files(digest, directory, COMPANIONS)
    for path in sorted(directory.glob("*.safetensors")):
        real, stat = path.resolve(), path.stat()
        folder = real.name
        if real.parent.name != "blobs":
            folder = f"{real} {stat.st_mtime_ns} {_sampled(real, stat.st_size, stat.st_ino, stat.st_ctime_ns)}"
        _add(digest, f"{path.name}/{stat.st_size}", folder.encode())
    return digest.hexdigest()


@cache
def _sampled(path: Path, size: int, inode: int, changed: int) -> str:
    """Return a digest of samples all over a file: they reach any tensor larger than a part in PLACES. `inode` and
    `changed` (the time that no copy sets) identify a state of the file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        for index in range(PLACES):
            file.seek(index * max(0, size - PLACE_BYTES) // (PLACES - 1))
            digest.update(file.read(PLACE_BYTES))
    return digest.hexdigest()


def _add_small_files(digest: hashlib._Hash, directory: Path, patterns: Sequence[str] = SMALL_FILES) -> None:
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}):
        _add(digest, str(path.relative_to(directory)), path.read_bytes())


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)

"""Prompts from the command line, a file or stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.config.files import read_text
from rlctl.data.image_rows import with_images
from rlctl.data.image_sources import IMAGES
from rlctl.data.prompt_records import checked_prompt, prompt_field_in, row_from_record
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.records import is_file_name, read_records, suffix_of
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig


def read_prompts(
    texts: Sequence[str], file: str | None, data: DataConfig, images: Sequence[str] = ()
) -> list[PromptRow]:
    """Return the prompts of `--prompt`, each with `images`, and of `--prompts-file`: a data file with
    `data.prompt_field`, or text with one prompt per line from a file or stdin (`-`). Raises InputError with the flag,
    the file and the line."""
    if images and not texts:
        raise InputError("--image applies to --prompt.", 'Give --prompt TEXT; a data file has a field "image".')
    prompts = [
        with_images(
            PromptRow(i, f"--prompt number {i + 1}", text, None),
            {IMAGES: list(images)},
            data.model_copy(update={"name": None}),
        )
        for i, text in enumerate(texts)
    ]
    for image in (image for row in prompts[:1] for image in row.images):
        image.size()  # raises for a missing file before the model is opened
    if file is not None:
        prompts += _file_prompts(Path(file), data)
    if file is not None and len(prompts) == len(texts):
        raise InputError(f"--prompts-file {file} holds no prompt.", "Write one on each line.")
    if not prompts:
        raise InputError("Nothing to complete.", "Give --prompt TEXT, or --prompts-file FILE.")
    return [replace(row, index=index) for index, row in enumerate(prompts)]


def _file_prompts(path: Path, data: DataConfig) -> Iterator[PromptRow]:
    if suffix_of(path) and is_file_name(str(path)):
        for where, record in read_records(path):
            yield _row(record, where, data.model_copy(update={"name": str(path)}))
        return
    text = _stdin() if str(path) == "-" else read_text(path, "--prompts-file")
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` would also split at characters in prompts
        where = f"{'stdin' if str(path) == '-' else path.name}, line {number}"
        if line.strip():
            yield PromptRow(0, where, checked_prompt(line, "prompt", where), None)


def _stdin() -> str:
    if sys.stdin.isatty():
        raise InputError("--prompts-file -: stdin is a terminal.", "Pipe the prompts in, one on each line.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts-file -: stdin is not UTF-8 text: {error}.") from error


def _row(record: Mapping[str, Any], where: str, data: DataConfig) -> PromptRow:
    if prompt_field_in(record, data.prompt_field) not in record:
        raise InputError(
            f"--prompts-file: {where} has no field `{data.prompt_field}` (it has: {', '.join(record)}).",
            "Name it with --set data.prompt_field.",
        )
    own_keys = {"name", "prompt_field", "image_folder", "image_pixels", "image_bytes"}
    read = DataConfig.model_validate(data.model_dump(include=own_keys))
    made = row_from_record(record, 0, f"--prompts-file: {where}", read)
    return replace(made, where=where, answer=None)

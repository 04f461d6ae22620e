"""`rlctl convert`: conversion between Hugging Face and Megatron, text parts, adapters, inspection of checkpoints."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import typer

from rlctl.checkpoints.staging import require_absent
from rlctl.commands import options, output
from rlctl.commands.output import examples, message, print_json, shows_progress
from rlctl.commands.parsing import App
from rlctl.config.files import user_path
from rlctl.errors import InputError
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.terminal import colored

if TYPE_CHECKING:
    from rlctl.checkpoints.conversion.hf_megatron import Options, Report

app = App()

Dtype: TypeAlias = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="Precision of the result; defaults to the source's."),
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace an existing destination.")]
NoVerify: TypeAlias = Annotated[
    bool, typer.Option("--no-verify", help="Skip reading the result back and comparing it with the source.")
]
Place: TypeAlias = Annotated[
    Path | None,
    typer.Argument(metavar="DST", help="Directory to write; defaults to where runs look for it.", show_default=False),
]
Revision: TypeAlias = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
Into: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--into",
        metavar="NAME|DIR",
        help="Multimodal model to write, with these weights as its text part.",
    ),
]
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@app.callback(epilog=examples("rlctl convert hf-to-megatron meta-llama/Llama-3.1-8B ./ckpt"))
def convert() -> None:
    """Convert checkpoints between Hugging Face and Megatron, extract text parts, and merge adapters."""


@app.command(
    "hf-to-megatron",
    epilog=examples(
        "rlctl convert hf-to-megatron meta-llama/Llama-3.1-8B ./ckpt",
        "rlctl convert hf-to-megatron ./my-model ./ckpt --dtype bfloat16 --json",
        "rlctl convert hf-to-megatron Qwen/Qwen3-0.6B",
    ),
)
def hf_to_megatron(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Hugging Face directory or hub name.")],
    destination: Place = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Also download a hub model's Python code; it is not run."),
    ] = False,
    no_verify: NoVerify = False,
    force: Force = False,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Keep a destination that was converted from the same source.")
    ] = False,
    json_: options.Json = False,
) -> None:
    """Write a Megatron checkpoint (torch_dist) that loads at any TP, PP and EP, with tokenizer and config next to it.

    Every tensor is read back and compared with the source unless --no-verify is given.
    """
    if destination is not None and not (force or reuse):
        require_absent(destination)
    _refuse_for_directory(source, "--revision" if revision else "--trust-remote-code" if trust_remote_code else None)
    from rlctl.checkpoints.conversion import hf_megatron as conversion
    from rlctl.checkpoints.conversion.prepared_model import conversion_directory
    from rlctl.checkpoints.hf.hf_model import open_hf_model
    from rlctl.preparation.open_model import find_model

    model = find_model(source, revision, trust_remote_code=trust_remote_code, tell=message)
    if model.note:
        message(model.note)
    if destination is None:
        precision: str = dtype or open_hf_model(model.directory).dtype
        dtype = cast(Any, precision)
        destination, reuse = conversion_directory(model.directory, precision), not force
        message(f"writing to {destination}, where runs that compute in {precision} look for it")
    with _settings(json_, dtype=dtype, verify=not no_verify, force=force, reuse=reuse) as settings:
        report = conversion.hf_to_megatron(model.directory, destination, settings)
    _print(report, json_)


@app.command(
    "text-part",
    epilog=examples(
        "rlctl convert text-part google/gemma-3-4b-it", "rlctl convert text-part ./my-model ./my-text-model"
    ),
)
def text_part(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Hugging Face directory or hub name.")],
    destination: Place = None,
    revision: Revision = None,
    no_verify: NoVerify = False,
    force: Force = False,
    json_: options.Json = False,
) -> None:
    """Write the text part of a multimodal model as a text model.

    The result has the names, configuration and tokenizer of a text model; the values stay the same, bit for bit.
    """
    if destination is not None and not force:
        require_absent(destination)
    _refuse_for_directory(source, "--revision" if revision else None)
    from rlctl.checkpoints.conversion.prepared_model import TEXT, conversion_directory
    from rlctl.checkpoints.conversion.text_model import take_text_part

    whole, reuse = _with_text_part(source, revision), destination is None and not force
    destination = destination or conversion_directory(whole, TEXT)
    with _settings(json_, verify=not no_verify, force=force, reuse=reuse) as settings:
        report = take_text_part(whole, destination, settings)
    _print(report, json_)


def _with_text_part(name: str, revision: str | None = None) -> Path:
    """Return the directory of a multimodal model. Raises InputError for text models."""
    from rlctl.checkpoints.hf.text_config import has_text_part
    from rlctl.checkpoints.model_files import resolve_model

    model = resolve_model(name, revision, tell=message)
    if model.megatron is not None or not has_text_part(model.directory):
        raise InputError(f"{name} is not a multimodal model.", "A text model needs no extraction; use it directly.")
    return model.directory


def _refuse_for_directory(source: str, flag: str | None) -> None:
    """Raise InputError for a flag of hub models next to a directory."""
    if flag is not None and user_path(source).is_dir():
        raise InputError(f"{flag} applies to hub models, and {source} is a directory.", f"Leave {flag} out.")


@app.command(
    "megatron-to-hf",
    epilog=examples(
        "rlctl convert megatron-to-hf ./ckpt ./my-model",
        "rlctl convert megatron-to-hf runs/my-run ./my-model --shard-size 2GB",
        "rlctl convert megatron-to-hf runs/my-run ./my-model --push-to-hub me/my-model",
        "rlctl convert megatron-to-hf ./megatron-lm-ckpt ./my-model --config-from meta-llama/Llama-3.1-8B",
        "rlctl convert megatron-to-hf runs/my-run ./my-model --into google/gemma-3-4b-it",
    ),
)
def megatron_to_hf(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Megatron checkpoint or rlctl run.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    config_from: Annotated[
        str | None, typer.Option("--config-from", metavar="NAME|DIR", help="Model that provides config and tokenizer.")
    ] = None,
    into: Into = None,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Maximum size of a file.")] = "5GB",
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the adapters in PEFT's format instead of merging them.")
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub",
            metavar="OWNER/NAME",
            help="Also upload to the Hugging Face hub, with a card.",
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push-to-hub: create a private repository.")
    ] = False,
    dtype: Dtype = None,
    no_verify: NoVerify = False,
    force: Force = False,
    json_: options.Json = False,
) -> None:
    """Write a Hugging Face directory from a Megatron checkpoint: safetensors, config, tokenizer, chat template.

    Reads conversions and runs of rlctl, and torch_dist checkpoints of Megatron-LM and Megatron-Bridge. Adapters of a
    run with training.lora are merged into its base model, or written as adapters.
    """
    if private and push_to_hub is None:
        raise InputError("--private applies to --push-to-hub.", "Add --push-to-hub OWNER/NAME.")
    if into and (dtype or adapter_only):
        flag = "--dtype" if dtype else "--adapter-only"
        raise InputError(f"{flag}: --into keeps the precisions of the whole model.", f"Leave {flag} out.")
    if not force:
        require_absent(destination)
    from rlctl.checkpoints.conversion import hf_megatron as conversion
    from rlctl.checkpoints.conversion import peft_adapters
    from rlctl.jobs.publish import publish, require_hub, run_of, write_card
    from rlctl.preparation.open_model import find_base

    if push_to_hub:
        require_hub(push_to_hub)
    companions = find_base(config_from, source, message) if config_from else None
    whole = _with_text_part(into) if into else None
    size = parse_size(shard_size)
    chosen: dict[str, Any] = {"dtype": dtype, "verify": not no_verify, "force": force}
    with _settings(json_, shard_bytes=size, whole=whole, **chosen) as settings:
        write = peft_adapters.megatron_to_peft if adapter_only else conversion.megatron_to_hf
        report = write(source, destination, companions, settings)
    address = None
    if push_to_hub:
        write_card(destination, push_to_hub, run_of(source))
        message(f"uploading to {push_to_hub}")
        address = publish(destination, push_to_hub, private=private)
    _print(report, json_, address)


@app.command(
    "merge-adapters",
    epilog=examples(
        "rlctl convert merge-adapters ./math ./code ./both --weights 0.7,0.3",
        "rlctl convert merge-adapters ./math ./my-model --onto meta-llama/Llama-3.1-8B",
    ),
)
def merge_adapters(
    places: Annotated[
        list[str],
        typer.Argument(metavar="ADAPTER... DST", help="PEFT directories or hub names, and the directory to write."),
    ],
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="W,W", help="Weight of each adapter; defaults to 1.")
    ] = None,
    combine: Annotated[
        Literal["cat", "linear"],
        typer.Option("--combine", help="cat adds updates exactly (ranks add up); linear adds A and B (one rank)."),
    ] = "cat",
    onto: Annotated[
        str | None,
        typer.Option("--onto", metavar="NAME|DIR", help="Base model: write its weights with the adapters merged."),
    ] = None,
    dtype: Dtype = None,
    no_verify: NoVerify = False,
    force: Force = False,
    json_: options.Json = False,
) -> None:
    """Write the weighted sum of PEFT adapters, as one adapter or merged into the base model.

    `cat` and `linear` mean what they mean to PEFT's `add_weighted_adapter`.
    """
    *names, place = places
    if not names:
        raise InputError("merge-adapters takes adapters and a destination.", "rlctl convert merge-adapters A B DST")
    if onto and combine == "linear":
        raise InputError("--combine linear combines adapters; --onto merges their exact sum.", "Leave one of them out.")
    factors = _weights(weights, len(names))
    destination = Path(place)
    if not force:
        require_absent(destination)
    from rlctl.checkpoints.conversion import merged_adapters
    from rlctl.checkpoints.hf.peft_files import read_peft_config
    from rlctl.checkpoints.model_files import resolve_adapter
    from rlctl.preparation.open_model import find_model

    adapters = [read_peft_config(resolve_adapter(name, message), name) for name in names]
    parts = [merged_adapters.Weighted(adapter, weight) for adapter, weight in zip(adapters, factors, strict=True)]
    base = find_model(onto, tell=message) if onto else None
    whole = base.origin if base and base.megatron is None else None
    if whole and dtype:
        raise InputError("--dtype: --onto keeps the precisions of a multimodal model.", "Leave --dtype out.")
    with _settings(json_, dtype=dtype, verify=not no_verify, force=force, whole=whole) as settings:
        if base:
            report = merged_adapters.merge_into_base(parts, base, destination, settings)
        else:
            report = merged_adapters.combine(parts, destination, combine, settings)
    _print(report, json_)


def _weights(text: str | None, count: int) -> list[float]:
    """Parse `0.7,0.3`, one weight for each adapter."""
    try:
        weights = [float(word) for word in text.split(",")] if text is not None else [1.0] * count
    except ValueError as error:
        raise InputError(f"--weights {text}: expected numbers such as 0.7,0.3.") from error
    if len(weights) != count or not all(map(math.isfinite, weights)):
        raise InputError(f"--weights {text}: expected {count} finite numbers, one for each adapter.")
    return weights


@app.command("inspect", epilog=examples("rlctl convert inspect ./ckpt", "rlctl convert inspect ./my-model --json"))
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint, model directory or run.")],
    json_: options.Json = False,
) -> None:
    """Describe a checkpoint: format, family, size, and problems."""
    from rlctl.checkpoints.inspection import inspect as look

    inspection = look(path)
    if json_:
        print_json(asdict(inspection))
        return
    agnostic = "loads under any parallel sizes" if inspection.parallelism_agnostic else "tied to its parallel sizes"
    output.show(f"format      {inspection.format} ({agnostic})")
    output.show(f"family      {inspection.family or 'unknown'}")
    if inspection.text_part:
        output.show(f"text part   {inspection.text_part}; `rlctl convert text-part` extracts it")
    if inspection.adapters:
        output.show("holds       adapters (training.lora); megatron-to-hf merges them or writes them for PEFT")
    output.show(
        f"parameters  {inspection.parameters:,} in {inspection.dtype or 'unknown'} ({inspection.bytes / 1e9:.2f} GB)"
    )
    output.show(f"iteration   {'none (converted)' if inspection.iteration is None else inspection.iteration}")
    output.show(f"optimizer   {'present' if inspection.optimizer else 'none'}")
    for problem in inspection.problems:
        output.show(f"problem     {problem}")


def parse_size(text: str) -> int:
    """Parse `5GB`, `500MiB` or a plain number into bytes."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]I?)?B?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise InputError(f"--shard-size {text}: expected a size such as 5GB or 500MB.")
    return size


@contextlib.contextmanager
def _settings(json_: bool, **chosen: Any) -> Iterator[Options]:
    from rlctl.checkpoints.conversion.hf_megatron import Options
    from rlctl.checkpoints.conversion.stream import progress_bar

    with StopRequest(lambda _: None), progress_bar(shows_progress(json_)) as show:
        yield Options(progress=show, tell=message, **chosen)


def _print(report: Report, json_: bool, address: str | None = None) -> None:
    if report.nans:
        subject = "1 tensor holds" if len(report.nans) == 1 else f"{len(report.nans):,} tensors hold"
        warning = colored(f"{subject} NaNs", "warn", sys.stderr)
        message(f"{warning}, which were kept: {', '.join(report.nans[:8])}")
    if json_:
        print_json(asdict(report) | ({"hub": address} if address else {}))
        return
    checked = colored("not verified", "warn", sys.stdout)
    if report.verified:
        checked = colored("every tensor read back and equal", "ok", sys.stdout)
    gb, seconds = report.bytes / 1e9, report.seconds
    rate = f"{gb:.2f} GB in {seconds:.1f} s ({gb / max(seconds, 1e-9):.2f} GB/s)"
    output.show(f"{report.tensors} tensors, {rate}, {checked}: {report.destination}")
    if address:
        output.show(f"uploaded: {address}")

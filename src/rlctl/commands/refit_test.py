"""`rlctl refit-test`: transfer weights from the policy into the engines and verify every tensor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.commands import options
from rlctl.commands.output import examples, message, print_json, show_dry_run
from rlctl.commands.parsing import App
from rlctl.errors import InputError
from rlctl.telemetry.terminal import colored

if TYPE_CHECKING:
    from rlctl.jobs.refit_report import RefitTestReport

app = App()
EXIT_MISMATCH = 5
NAMED = 8  # tensors that are named at the terminal where they were not compared

Receive = Annotated[
    Literal["auto", "loader", "direct"],
    typer.Option(
        "--receive",
        help="direct writes into the engine's parameters, loader uses the engine's loader, auto chooses per tensor.",
    ),
]
Repeat = Annotated[int, typer.Option("--repeat", min=2, help="Number of transfers; weights are perturbed in between.")]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain", help="Show the receive path of each tensor and why; with --dry-run, the rules of the plan."
    ),
]
Synthetic = Annotated[
    str | None,
    typer.Option(
        "--synthetic",
        help="Transfer all tensors of a published model (deepseek-v3, ...) at reduced width, without engines.",
    ),
]


@app.command(
    "refit-test",
    epilog=examples(
        "rlctl refit-test --preset laptop",
        "rlctl refit-test --model ./my-model --tp 2 --repeat 3",
        "rlctl refit-test --model ./my-model --receive loader --json",
        "rlctl refit-test --synthetic deepseek-v3 --tp 2 --generation-tp 2",
    ),
)
@options.taking(
    "model preset config set_ backend tp dp generation_tp mover sparse nodes gpus_per_node gpu ray_address dry_run"
)
def refit_test(
    context: typer.Context,
    model: str | None,
    dry_run: bool,
    receive: Receive = "auto",
    repeat: Repeat = 2,
    explain: Explain = False,
    synthetic: Synthetic = None,
    json_: options.Json = False,
) -> None:
    """Transfer weights from the policy into the engines and compare every tensor.

    Starts policy and engines with the layout of `train` (--set pins values), transfers at least twice with perturbed
    weights in between, reads every tensor back from the engine's memory, and compares log-probs of greedy and sampled
    tokens. The exit code is 5 if anything differs.
    """
    resolved = options.resolve_config(**context.params)
    if synthetic is not None:
        from rlctl.jobs.refit_synthetic import SyntheticJob, run_synthetic

        loader = "--receive loader" if receive == "loader" else None
        if other := next(filter(None, ("--dry-run" if dry_run else None, model and f"--model {model}", loader)), None):
            reason = f"--synthetic {synthetic} uses neither a model nor a plan nor an engine: {other} would do nothing."
            raise InputError(reason, "Leave one of them out.")
        _show(run_synthetic(SyntheticJob(resolved.config, synthetic, repeat), message), json_, explain)
    elif dry_run:
        from rlctl.jobs.dry_run import dry_refit_test

        show_dry_run(dry_refit_test(resolved), json_, explain)
    else:
        from rlctl.jobs.refit_test import run_refit_test
        from rlctl.jobs.refit_test_job import refit_test_job

        _show(run_refit_test(refit_test_job(resolved, receive, repeat, message), message), json_, explain)


def _show(test: RefitTestReport, json_: bool, explain: bool) -> None:
    print_json(test.to_json(explain)) if json_ else print("\n".join(text_of(test, explain)))
    if not test.passed:
        raise typer.Exit(EXIT_MISMATCH)


def text_of(test: RefitTestReport, explain: bool = False) -> list[str]:
    """Return the result as lines; with `explain` one line per tensor."""
    report = test.to_json()
    lines = [
        f"refit of {report['model']}: {report['tensors']} tensors, {report['payload_bytes'] / 1e6:.0f} MB, "
        f"{report['mover']}, {report['receive']} path",
        "",
        f"{'phase':<14}{'first':>10}{'warm':>10}",
    ]
    for phase, value in report["seconds"].items():
        lines.append(f"{phase:<14}{report['seconds_first'].get(phase, 0.0):>9.3f}s{value:>9.3f}s")
    share = report["fraction_of_limit"]
    lines += [
        "",
        f"{report['gb_per_s']:.2f} GB/s, {share:.0%} of copying within memory ({report['limit_gb_per_s']:.1f} GB/s); "
        f"staging memory {report['staging_peak_bytes'] / 1e6:.0f} MB; comparing every tensor took "
        f"{report['verify_seconds']:.2f} s",
        "",
    ]
    if report["sparse"]:
        lines.insert(-1, f"sent in the last refit: {report['sent_bytes'] / 1e6:.1f} MB; {report['sparse']}")
    if not test.synthetic:
        lines.insert(
            -1,
            f"log-probs, engine against policy: mean {report['logprobs']['mean_abs']:.1e}, max "
            f"{report['logprobs']['max_abs']:.1e}, KL {report['logprobs']['kl']:.1e} "
            f"(with the weights changed and not yet transferred: max {report['logprobs_before']['max_abs']:.1e})",
        )
    lines += [str(share) for share in test.reports[-1].shares]
    if explain:
        lines += [
            f"  {tensor_path['name']}: {tensor_path['path']}, {tensor_path['reason']}"
            for tensor_path in test.tensor_paths
        ]
    if test.synthetic:
        lines.append("reduced width, no engine: every tensor compared, nothing generated")
    left_out = colored("not compared", "warn", sys.stdout)
    lines += [f"{left_out}: {name}: {reason}" for name, reason in test.unread[:NAMED]]
    if len(test.unread) > NAMED:
        lines.append(f"{left_out}: {len(test.unread) - NAMED} more (--json names them)")
    if test.quantized:
        lines.append("the engine's weights are quantized: log-probs must be closer than with the previous weights")
    equal = "every tensor equal" if not test.unread else f"{report['tensors']} tensors equal, the others not compared"
    wrong = colored("WRONG", "fail", sys.stdout)
    lines += [f"{wrong}  {problem}" for problem in test.problems] or [colored(equal, "ok", sys.stdout)]
    return lines

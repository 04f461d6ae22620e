"""Measures seconds and memory of one rank's part of a transfer plan as ranks and experts grow.

    python benchmarks/plan_scale.py            # DeepSeek-V3, up to 1,024 training ranks and 256 generation ranks
    python benchmarks/plan_scale.py --quick    # the smallest row only

Each row runs in a process of its own, so that its memory is its own. A rank waits this long once, at the start of a
run; every refit uses the same plan.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace

ROWS = (  # experts, training (tp, pp, ep, dp), generation (tp, dp)
    (64, (4, 4, 16, 4), (4, 8)),
    (128, (4, 8, 16, 8), (8, 8)),
    (256, (4, 8, 64, 16), (8, 16)),
    (256, (4, 16, 64, 16), (8, 32)),
)


def measure(experts: int, training: tuple[int, ...], generation: tuple[int, ...]) -> dict[str, float]:
    """Plan for one destination rank and one source rank of DeepSeek-V3 with `experts` experts a layer."""
    from rlctl.config.parallel import ParallelSpec
    from rlctl.models.catalog import lookup
    from rlctl.models.families import weights_of
    from rlctl.weights import hf
    from rlctl.weights.megatron import MegatronWorld
    from rlctl.weights.transfer_plan import receive_plan
    from rlctl.weights.vllm import VllmParallel, VllmWorld

    facts = lookup("deepseek-ai/DeepSeek-V3")
    assert facts is not None
    assert facts.moe is not None
    facts = replace(facts, moe=replace(facts.moe, experts=experts), mtp_layers=0)
    tp, pp, ep, dp = training
    first = 61 - (pp - 1) * (61 // pp) if 61 % pp else None
    parallel = ParallelSpec(tp=tp, pp=pp, dp=dp, ep=ep, etp=1, first_stage_layers=first)
    source = MegatronWorld(facts, parallel, "te", "bfloat16", "grouped")
    target = VllmWorld(facts, VllmParallel(generation[0], generation[1], ep=True))
    begun = time.perf_counter()
    tensors = len(weights_of(facts).tensors)
    described = time.perf_counter()
    plan = receive_plan(source, target.layout(target.size - 1)).prove()
    received = time.perf_counter()
    shares = receive_plan(source, hf.layout(facts, "bfloat16"), only=source.size // 2).copies
    done = time.perf_counter()
    return {
        "tensors": tensors, "training": source.size, "generation": target.size, "describe_s": described - begun,
        "receive_s": received - described, "shares_s": done - received, "copies_in": len(plan.copies),
        "peers_in": len(plan.sources), "shares": len(shares),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        print(json.dumps(measure(*ROWS[arguments.row])))
        return
    print("DeepSeek-V3, bf16; one destination rank proves its plan, one source rank finds its share of each tensor")
    print("tensors  ranks        describe   receive    shares   copies in/shares  peers   memory")
    for row in range(1 if arguments.quick else len(ROWS)):
        command = [sys.executable, __file__, "--row", str(row)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
        print(
            f"{found['tensors']:7,}  {found['training']:5,} -> {found['generation']:3}"
            f"  {found['describe_s']:7.2f} s {found['receive_s']:7.2f} s {found['shares_s']:7.2f} s"
            f"  {found['copies_in']:6,}/{found['shares']:6,}  {found['peers_in']:5}"
            f"  {found['megabytes']:5.0f} MB"
        )


if __name__ == "__main__":
    main()

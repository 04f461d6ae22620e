"""Compares the planned memory of a policy's process on this CPU with what it takes, by phase.

    python benchmarks/policy_memory.py --model DIR [--model DIR ...] [--row-tokens 2048]

Each backend trains each model in each number format, in a process of its own: log-probs, a training step, and a save
during a second step. Its highest resident memory in each phase (Linux) is compared with the plan for the same rows.
Models are Hugging Face directories; without `--model`, random Llamas of 29 and 134 million parameters are made.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from one_process import facts_of, highest_bytes

from rlctl.planner.inputs.cluster import GIB

BACKENDS, FORMATS = ("megatron", "dtensor"), ("float32", "bfloat16")
PHASES = ("logprobs", "training", "saving")
SIZES = {"29M": (8, 384, 1024, 6, 2), "134M": (30, 576, 1536, 9, 3)}
"""Layers, hidden size, width of the MLP, heads and key-value heads of the random models."""
VOCAB = 49152
PROMPT_TOKENS, NEW_TOKENS, GENERATIONS = 64, 192, 4


@dataclass(frozen=True)
class Case:
    """One process: a model, a backend, a number format."""

    model: Path
    backend: str
    dtype: str
    row_tokens: int

    def measured(self) -> dict[str, int]:
        """Return the bytes by phase of a process of its own."""
        words = [str(self.model), self.backend, self.dtype, str(self.row_tokens)]
        done = subprocess.run(
            [sys.executable, __file__, "--one", *words], check=True, text=True, stdout=subprocess.PIPE
        )
        return json.loads(done.stdout.splitlines()[-1])

    def planned(self) -> dict[str, float]:
        """Return the bytes by phase of the plan of such a run."""
        from rlctl.planner.inputs.cluster import make_cluster
        from rlctl.planner.inputs.request import Request, Workload
        from rlctl.planner.make_plan import make_plan

        work = Workload(
            prompts(self.row_tokens), GENERATIONS, PROMPT_TOKENS + NEW_TOKENS, mean_new_tokens=NEW_TOKENS,
            prompt_tokens=PROMPT_TOKENS,
        )  # fmt: skip
        pins = {
            "training.backend": self.backend, "training.dp": 1, "training.tp": 1, "training.recompute": "none",
            "training.micro_batch_tokens": self.row_tokens, "generation.engines": 1, "generation.tp": 1,
        }  # fmt: skip
        precision = "float32" if self.dtype == "float32" else "bf16"
        plan = make_plan(Request(facts_of(self.model), make_cluster("cpu"), work, pins, training_precision=precision))
        return {phase: plan.memory[phase].total for phase in PHASES}


def prompts(row_tokens: int) -> int:
    """Return the prompts of a step of two rows."""
    return 2 * row_tokens // (GENERATIONS * (PROMPT_TOKENS + NEW_TOKENS))


def measure_one(case: Case) -> dict[str, int]:
    """Be the policy: return the highest resident bytes of each phase."""
    import numpy as np
    from train import LR, Shape, make_groups, plan

    from rlctl.backends.base import PolicySpec
    from rlctl.backends.lookup import policy_backend
    from rlctl.cluster.worker_host import imported

    spec = PolicySpec(facts_of(case.model), dtype=case.dtype, threads=2, model_dir=case.model)  # type: ignore[arg-type]
    worker = imported(policy_backend(case.backend).worker)(0, 1, "127.0.0.1", spec)
    worker.setup(worker.open_store())
    worker.load_model(case.model)
    groups = make_groups(Shape(prompts(case.row_tokens), GENERATIONS, PROMPT_TOKENS, NEW_TOKENS), spec.facts.vocab)
    batch = plan(groups, False, case.row_tokens)
    assert np.isfinite(LR)
    from one_process import PolicyGradient

    def train() -> None:
        worker.load_batch(batch.shards[0], list)
        worker.train_minibatch(0, PolicyGradient(), LR)

    def logprobs() -> None:
        worker.load_batch(batch.shards[0], list)
        worker.add_logprobs("old_logprobs")

    def save() -> None:
        with tempfile.TemporaryDirectory() as directory:
            worker.save_begin(Path(directory))
            train()
            worker.save_finish()

    with contextlib.redirect_stdout(sys.stderr):
        train()  # which makes the optimizer's states
        steps: dict[str, Callable[[], None]] = {"logprobs": logprobs, "training": train, "saving": save}
        found = {phase: highest_bytes(step) for phase, step in steps.items()}
    worker.close()
    return found


def make_model(directory: Path, sizes: tuple[int, int, int, int, int]) -> Path:
    """Write a random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, width, heads, kv_heads = sizes
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", help="Hugging Face directory")
    parser.add_argument("--row-tokens", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, backend, dtype, tokens = args.one
        print(json.dumps(measure_one(Case(Path(model), backend, dtype, int(tokens)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        models = args.model or [make_model(Path(folder, name), sizes) for name, sizes in SIZES.items()]
        compare([Case(m, b, d, args.row_tokens) for m in models for b in BACKENDS for d in FORMATS])


def compare(cases: list[Case]) -> None:
    print(f"| model | backend | format | {' | '.join(f'{phase}: planned, measured GiB' for phase in PHASES)} |")
    print(f"|{'---|' * (3 + len(PHASES))}")
    ratios = []
    for case in cases:
        gc.collect()
        measured, planned = case.measured(), case.planned()
        cells = []
        for phase in PHASES:
            ratios.append(planned[phase] / measured[phase])
            cells.append(f"{planned[phase] / GIB:.2f}, {measured[phase] / GIB:.2f} ({ratios[-1]:.2f})")
        print(f"| {case.model.name} | {case.backend} | {case.dtype} | {' | '.join(cells)} |", flush=True)
    off = [abs(ratio - 1) for ratio in ratios]
    print(f"planned over measured: {100 * median(off):.0f}% off in the median, {100 * max(off):.0f}% at most")


if __name__ == "__main__":
    main()

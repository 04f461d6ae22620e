"""Write the page on models: `python docs/models.py` plans each model of models.yaml and writes models.md.

models_compared.yaml has the comparisons with transformers. The nightly tests repeat them, and record them:

    RLCTL_RECORD=docs/models_compared.yaml .venv/bin/python -m pytest -m slow tests/parallel/test_model_types.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.checkpoints.hf.model_facts import known_facts
from rlctl.errors import NoPlanError, RlctlError
from rlctl.methods.configuration import resolve
from rlctl.models.catalog import lookup_entry
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file
from rlctl.models.vision import vision_family
from rlctl.planner.costs.parameters import count
from rlctl.planner.result import Plan
from rlctl.preparation.shown_plan import shown_plan
from rlctl.preparation.worker_specs import planned_workers
from rlctl.tiny_models.of_transformers import variant_of

FOLDER = Path(__file__).parent
LIST, COMPARED, PAGE = FOLDER / "models.yaml", FOLDER / "models_compared.yaml", FOLDER / "models.md"
TYPES = {"gemma3": "gemma3_text"}
"""Model types of families whose file has another name."""
CLUSTERS = [("h100", nodes) for nodes in (1, 2, 4, 8, 16, 32, 64)] + [("b300", nodes) for nodes in (4, 8, 16, 32, 64)]
"""GPU types and numbers of nodes with eight GPUs, in the order in which they are tried."""
BYTES = 18
"""Least bytes of GPUs per parameter, below which no plan is tried: weights, gradients and optimizer states."""
FAR = 1e-4
"""Differences of log-probs beyond this are no rounding."""
INTRODUCTION = """\
# Models

`python docs/models.py` plans each of these models and writes this page. It shows what `--backend auto` selects for 100
open models that people train in 2025 and 2026, and what was compared with transformers. Other models with the
architecture of a row are treated alike; [training.md](training.md#families-without-a-file) lists further types.
{counts}

- **fits on**: the smallest number of nodes among 1, 2, 4, ... with a plan for GRPO of all weights under defaults.
- **trainer**, **engine**: the largest difference of a log-prob from transformers' in float32, for a random model of
  this type with two layers on a CPU: of the dtensor backend, whose loss and gradients are compared too, and of vLLM
  after a refit into spoiled weights. `make nightly` repeats this (`tests/parallel/test_model_types.py`), and compares
  the backend megatron under each kind of parallelism (`tests/parallel/test_families.py`). Models that take images are
  compared as the text models that are trained without images; `tests/parallel/test_vision.py` has whole ones.
- **refused**: what the plan of this model refuses, with the reason: `training.tp` on dtensor needs a file of the
  family, and packing and `training.cp` need layers that take packed rows.
"""


HEADER = ["model", "parameters", "type", "backend", "fits on", "trainer", "engine", "refused"]


@dataclass(frozen=True)
class Row:
    """A model of the table."""

    name: str
    facts: ModelFacts | None
    plan: Plan | None
    refused: str
    """Why the model has no plan; empty: it has one."""
    compared: dict[str, Any]

    @property
    def is_compared(self) -> bool:
        """Whether trainer and engine were found equal to transformers."""
        return all(self.compared.get(part, {}).get("logprobs", 1.0) <= FAR for part in ("trainer", "engine"))

    def cells(self) -> list[str]:
        facts, plan = self.facts, self.plan
        if facts is None or plan is None:
            return [f"`{self.name}`", *[""] * (len(HEADER) - 2), self.refused.removeprefix("model.name: ")]
        total, active = count(facts).total / 1e9, count(facts).active / 1e9
        size = f"{total:.3g} B" + (f", {active:.2g} B active" if facts.moe else "")
        cluster = plan.cluster
        where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.device.name.upper()}"
        of_type = type_of_row(facts)
        kind = f"{of_type.partition(':')[0]}{' with experts' if of_type.endswith(':experts') else ''}"
        parts = [difference(self.compared.get(part, {})) for part in ("trainer", "engine")]
        return [f"`{self.name}`", size, kind, plan.backend, where, *parts, "; ".join(self.limits())]

    def limits(self) -> Iterator[str]:
        assert self.facts is not None
        if not has_file(self.facts.family):
            yield "`tp`"
        if self.facts.unpacked:
            yield "packing, `cp`"
        if not self.facts.takes_adapters:
            yield "adapters"
        engine = self.compared.get("engine", {})
        if reason := engine.get("refused") or engine.get("cause"):
            yield f"engines on CPUs: {reason}"
        entry = lookup_entry(self.name)
        if entry is not None and entry.text_part and vision_family(entry.config) is None:
            yield "images"


def type_of_row(facts: ModelFacts) -> str:
    """Return the name of the tiny model that stands for a model (`tiny_models/of_transformers.py`)."""
    return TYPES.get(facts.family, facts.family) if has_file(facts.family) else variant_of(facts)


def difference(outcome: dict[str, Any]) -> str:
    return f"{outcome['logprobs']:.0e}" if "logprobs" in outcome else "-"


def row_of(name: str, compared: dict[str, Any]) -> Row:
    """Plan a model on the smallest cluster that fits."""
    try:
        facts = known_facts(name)
        assert facts is not None, f"{name} is not in the catalog"
        return Row(name, facts, smallest_plan(name, facts), "", compared.get(type_of_row(facts), {}))
    except RlctlError as error:
        return Row(name, None, None, error.message, {})


def smallest_plan(name: str, facts: ModelFacts) -> Plan:
    """Return the plan on the first of `CLUSTERS` that fits. Raises the error of the last one, or of a model that no
    cluster helps."""
    absent: RlctlError | None = None
    for gpu, nodes in CLUSTERS:
        if gpu == "h100" and count(facts).total * BYTES > nodes * 8 * 80e9 * 2:
            continue
        flags = {"model.name": name, "cluster.gpu": gpu, "cluster.nodes": nodes, "cluster.gpus_per_node": 8}
        resolved = resolve(flags=flags, environment={})
        try:
            plan = shown_plan(resolved, 1, lambda _: None)
            planned_workers(resolved.with_plan(plan).config, facts, plan, Path(name), None)
            return plan
        except NoPlanError as error:
            absent = error
    assert absent is not None
    raise absent


def rows() -> Iterator[tuple[str, list[Row]]]:
    """Yield each kind of model with its rows."""
    compared = yaml.safe_load(COMPARED.read_text())
    for kind, names in yaml.safe_load(LIST.read_text()).items():
        yield kind, [row_of(name, compared) for name in names]


def page(tables: list[tuple[str, list[Row]]]) -> str:
    """Return the page on these rows."""
    every = [row for _, table in tables for row in table]
    planned = [row for row in every if row.plan is not None]
    equal = [row for row in planned if row.is_compared]
    counts = (
        f"Of {len(every)} models {len(planned)} have a plan, and {len(equal)} train and generate on CPUs at tiny size\n"
        "with log-probs equal to transformers'."
    )
    parts = [INTRODUCTION.format(counts=counts)]
    for kind, table in tables:
        lines = [f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER))]
        lines += [line_of(row) for row in table]
        parts.append(f"## {kind}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def line_of(row: Row) -> str:
    return f"| {' | '.join(row.cells())} |"


if __name__ == "__main__":
    tables = list(rows())
    PAGE.write_text(page(tables))
    for row in (row for _, table in tables for row in table if row.plan is None or not row.is_compared):
        sys.stdout.write(f"{row.name}: {row.refused or row.compared}\n")

"""Stand-ins for parts of a rehearsed run: model, tokenizer, rows and scorer."""

from __future__ import annotations

from pathlib import Path

from rlctl.data.prompts import open_prompts
from rlctl.errors import AbsentError
from rlctl.preparation.planned import Planned
from rlctl.rehearsal.findings import Rehearsal
from rlctl.rehearsal.shrink import (
    VARYING,
    StandIns,
    usual_letter,
)
from rlctl.rehearsal.stand_ins import generated_rows, names_of_data, write_model


def write_stand_ins(planned: Planned, folder: Path, rehearsal: Rehearsal) -> StandIns:
    """Write the model, rows and scorer that a rehearsal uses in place of the run's, and list them in `rehearsal`."""
    config, method, plan = planned.config, planned.method, planned.early
    tokenizer, reason = write_model(folder / "model", config.model, plan)
    rehearsal.stand_ins.append(("model", f"a random {plan.facts.family} of two layers for {config.model.name}"))
    if reason is None:
        rehearsal.done.append(("tokenizer", f"from {config.model.tokenizer or config.model.name}"))
    else:
        rehearsal.stand_ins.append(("tokenizer", reason))
    teacher = None
    if plan.teacher is not None:
        teacher, scores = folder / plan.teacher.role, plan.teacher.choice.valued
        # Another seed than the policy's: with equal weights there would be nothing to learn.
        write_model(teacher, config.model, plan, plan.teacher.facts, seed=1, scores=scores)
        rehearsal.stand_ins.append((plan.teacher.label, f"a random {plan.teacher.facts.family} of two layers"))
    rows: list[tuple[str, Path]] = []
    for number, (name, data, rewards) in enumerate(names_of_data(config)):
        try:
            open_prompts(data, config.run.seed, method.rows)
        except AbsentError as error:
            path = folder / f"rows_{number}.jsonl"
            generated_rows(
                path, data, rewards, method.rows, plain=bool(config.tokenizer_teachers),
                images=plan.facts.vision is not None,
            )  # fmt: skip
            rows.append((name, path))
            rehearsal.stand_ins.append((f"rows of {name}", f"generated sums; {error.message}"))
    if config.turn_tokens:
        (folder / "rehearsal.py").write_text(VARYING)
        note = "the share of some letters is added to the rewards, and one letter ends completions"
        rehearsal.stand_ins.append(("success of a random model", note))
    letter = usual_letter([*map(str, tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))])
    keeps = config.model.tokenizer is not None and reason is None
    return StandIns(folder, folder / "model", teacher, keeps, letter, tuple(rows))

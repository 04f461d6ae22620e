"""Keys of the layout of a computation."""

from __future__ import annotations

from rlctl.config.parallel import SIZES

TRAINING_CHOSEN = (*SIZES, "sequence_parallel", "micro_batch_tokens", "recompute", "optimizer_offload")
"""Keys of `training` that every plan of a training decides."""
TEACHER_SIZES = tuple(size for size in SIZES if size != "vpp")
"""Keys of `teacher` or `reward_model` that every plan with such a model decides."""
LAID_OUT = {
    "teacher": TEACHER_SIZES,
    "reward_model": TEACHER_SIZES,
    "training": (*TRAINING_CHOSEN, "threads", "first_stage_layers", "last_stage_layers", "replicate"),
    "generation": (
        "engines", "tp", "pp", "dp", "ep", "memory_fraction", "kv_cache_bytes", "max_concurrent", "max_batched_tokens",
        "threads", "colocated", "devices",
    ),
}  # fmt: skip
"""Layout keys of policy, teacher, reward model and engines by section; the planner sets unset ones."""
LAYOUT = (
    "training.backend", "cluster.nodes", "cluster.gpus_per_node", "cluster.gpu",
    *(f"{section}.{key}" for section, keys in LAID_OUT.items() for key in keys),
)  # fmt: skip
"""Layout keys of a computation, which change results only within rounding. After a change, the planner sets the others
anew."""


LAYOUT_OF_A_RECIPE = (
    "training.packing",
    "training.dynamic_batching",
    *(
        key
        for key in LAYOUT
        if not key.startswith("cluster.") and key not in ("generation.colocated", "generation.devices")
    ),
)
"""Layout keys of a recipe that rlctl drops if no plan fits, because they were chosen for another machine."""

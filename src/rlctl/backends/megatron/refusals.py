"""Combinations that Megatron-Core takes and computes wrongly, without an error; refused before anything starts.

Each was seen with megatron-core 0.16.1 against one process, or follows from how this backend uses it. What this backend
avoids by itself is not here: the down-projections of MLA are replicated (their gradients are wrong when split), tied
embeddings, and the last all-gather of parameters is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.backends.base import PolicySpec
from rlctl.errors import ConfigError


def refuse_wrong_numbers(spec: PolicySpec) -> None:
    """Raises ConfigError for the first field of the `megatron` section that makes gradients wrong."""
    for key, reason in _wrong(spec):
        raise ConfigError(f"megatron.{key} = {spec.megatron[key]} is not run: {reason}.", "Remove it.")


def _wrong(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    given = spec.megatron
    if given.get("cross_entropy_loss_fusion"):
        yield "cross_entropy_loss_fusion", "it changes gradients by 2e-4"
    for key in ("hidden_dropout", "attention_dropout"):
        if given.get(key):
            yield key, "log-probs under dropout are not those of the policy that sampled"
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if _largest(given.get(key)) > 0:
            yield (
                key,
                (
                    "Megatron multiplies this loss by the tokens of a micro-batch, to divide all by the tokens of the "
                    "batch later; here the policy's loss carries its own weights and nothing is divided"
                ),
            )
    if spec.device == "cpu":
        yield from _wrong_over_gloo(spec)


def _wrong_over_gloo(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    given, freed = spec.megatron, "gloo still reads what a stage has sent when it is freed or overwritten"
    if spec.parallel.pp > 1 and given.get("deallocate_pipeline_outputs"):
        yield "deallocate_pipeline_outputs", freed
    if spec.parallel.vpp > 1 and given.get("overlap_p2p_comm") is False:
        yield "overlap_p2p_comm", f"with virtual stages, {freed}"
    if spec.parallel.vpp > 1 and given.get("batch_p2p_comm"):
        yield "batch_p2p_comm", f"with virtual stages, {freed}"


def _largest(value: object) -> float:
    """Of a coefficient, or of a list of them."""
    values = value if isinstance(value, list | tuple) else [value]
    return max((float(one) for one in values if isinstance(one, int | float)), default=0.0)

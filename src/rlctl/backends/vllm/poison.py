"""Makes everything that a model computes with not-a-number, so that a refit which is equal afterwards wrote all of it.

Written apart from the direct path on purpose: what that forgets to write, this must not forget to spoil.
"""

from __future__ import annotations

import torch

from rlctl.backends.vllm import live
from rlctl.backends.vllm.reload import abandon


def poison(model: torch.nn.Module) -> int:
    """Fill every weight, every repacked copy and every tensor derived from weights; returns how many were filled.

    Buffers stay: a refit does not send them.
    """
    abandon(model)  # parameters of an interrupted reload are not in place
    found, opaque = live.sites(model)[:2]
    known = {f"{site.path}.{site.parameter}" for site in found}
    for site in found:
        if site.form is live.Form.REPACKED:
            _poison_repacked(site)
        else:
            spoiled = site.kept()
            if site.parts:  # the zeros that other ranks add to one rank's bias are no weights
                spoiled.fill_(float("nan"))
    for site in opaque:
        if site.derived:  # no parameter in every version of vLLM
            _poison_attributes(site)
    unknown = [parameter for name, parameter in model.named_parameters() if name not in known]
    for parameter in unknown:
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    return len(found) + len(unknown)


def _poison_attributes(site: live.Site) -> None:
    """Spoil what latent attention made of its kv_b."""
    for name in ("W_UK_T", "W_UV"):
        made = getattr(site.module, name, None)
        if isinstance(made, torch.Tensor):
            made.data.fill_(float("nan"))


def _poison_repacked(site: live.Site) -> None:
    """Let the module pack a matrix of not-a-number as it packs its weight at the start."""
    module, kept = site.module, getattr(site.module, site.parameter)
    rows = max(part.row + part.rows for part in site.parts)
    if kept.numel():
        kept.data.fill_(float("nan"))
    else:
        spoiled = torch.full((rows, site.columns), float("nan"), dtype=kept.dtype)
        module.register_parameter(site.parameter, torch.nn.Parameter(spoiled, requires_grad=False))
    module.quant_method.process_weights_after_loading(module)

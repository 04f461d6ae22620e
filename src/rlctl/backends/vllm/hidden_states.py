"""Hidden states of vLLM's workers. Its models have transformers' module names below each layer, with few exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from rlctl.backends.hidden_states import IN, LOGITS, NORM, OUT, Paths, States, recorded
from rlctl.errors import WorkerError

ALIASES = {"self_attn": ("attn", "attention"), "mlp": ("block_sparse_moe", "feed_forward", "moe")}
"""Other names of vLLM for transformers' modules of a layer."""


class Recorder:
    """Hooks in a worker's model, until `end`."""

    def __init__(self, worker: Any, paths: Paths) -> None:
        self.model: Any = worker.model_runner.get_model()
        self._hooks = contextlib.ExitStack()
        self.values = self._hooks.enter_context(recorded(dict(_spans(self.model, paths))))

    def end(self, sequence: int, tokens: int, logits: int) -> list[States]:
        """Return the values of the first `tokens` computed tokens, which are `sequence`. Every worker computes logits
        with the others."""
        self._hooks.close()
        states, token_T = list[States](), np.arange(tokens)
        whole = {name: torch.cat(passes)[:tokens] for name, passes in self.values.items()}
        for name, values_TH in whole.items():
            if len(values_TH) < tokens:
                reason = f"{len(values_TH)} of {tokens} tokens were computed"
                raise WorkerError(f"The hidden states {name} are incomplete: {reason}.", "Use fewer tokens.")
            states.append(States(name, np.full(tokens, sequence), token_T, 0, values_TH))
        if NORM + OUT not in whole:  # the last pipeline stage alone has the norm
            return states
        first = max(0, tokens - 1 - logits)
        hidden_UH = whole[NORM + OUT][first : tokens - 1]
        device = next(self.model.parameters()).device
        with torch.no_grad():
            computed = self.model.compute_logits(hidden_UH.to(device))
        if computed is not None:  # the first tensor-parallel rank has them
            places = np.full(len(hidden_UH), sequence), token_T[first : tokens - 1]
            states.append(States(LOGITS + IN, *places, 0, hidden_UH))
            states.append(States(LOGITS + OUT, *places, 0, computed.cpu()))
        return states


def begin(worker: Any, paths: Paths) -> None:
    worker.rlctl_states = Recorder(worker, paths)


def end(worker: Any, sequence: int, tokens: int, logits: int) -> list[States]:
    return worker.rlctl_states.end(sequence, tokens, logits)


def _spans(model: nn.Module, paths: Paths) -> Iterator[tuple[str, Any]]:
    modules = dict(model.named_modules())
    lists = [path for path, module in modules.items() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda path: sum(parameter.numel() for parameter in modules[path].parameters()))
    for point, span in paths.items():
        span_modules = [_found(modules, layers, path) for path in span]
        if all(span_modules):
            yield point, tuple(span_modules)


def _found(modules: dict[str, nn.Module], layers: str, path: str) -> nn.Module | None:
    """Return vLLM's module for one of transformers; None: another stage has it, or it has another name."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    parent = layers.rpartition(".")[0] if number is None else f"{layers}.{parts[number]}"
    leaf = parts[-1]
    names = [f"{parent}.{name}" for name in (leaf, *ALIASES.get(leaf, ()))]
    return next((modules[name] for name in names if name in modules), None)

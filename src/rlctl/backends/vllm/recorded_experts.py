"""The experts of each token as a column of each sample, recorded if vLLM does not.

vLLM's record (`enable_return_routed_experts`) has no CPU version. Every router calls a function with its choice, which
`Recorder` observes in the worker.

Suffixes: T tokens, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.backends.vllm import compat

if TYPE_CHECKING:
    import torch

Span = tuple[int, np.ndarray]
"""(position of the first token in its sample, int16 [T, L, K]); -1 in layers without experts."""


def assembled(
    tokens: Mapping[str, np.ndarray], spans: Mapping[str, Sequence[Span]], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """int16 [T, L, K] per sample, `shape` (L, K); -1 if unknown, as for the last token. Cached prefixes are copied from
    the sample that computed them. vLLM's record lacks samples that end by limit or abort: they are all -1."""
    routed = {name: np.full((len(token_ids), *shape), -1, np.int16) for name, token_ids in tokens.items()}
    for name, token_spans in spans.items():
        for start, rows in token_spans:  # later experts replace experts computed before weights changed
            routed[name][start : start + len(rows)] = rows[: len(routed[name]) - start]
    missing = {name: _missing(rows_TLK) for name, rows_TLK in routed.items()}
    for name in sorted(missing, key=lambda tensor: missing[tensor]):
        if count := missing[name]:
            _borrow(name, count, tokens, routed, missing)
    return routed


def _missing(rows_TLK: np.ndarray) -> int:
    known_T = rows_TLK.reshape(len(rows_TLK), -1).max(axis=1, initial=-1) >= 0
    return int(known_T.argmax()) if known_T.any() else len(rows_TLK)


def _borrow(
    name: str, count: int, tokens: Mapping[str, np.ndarray], routed: dict[str, np.ndarray], missing: dict[str, int]
) -> None:
    prefix = tokens[name][:count]
    for other, rows_TLK in routed.items():
        if missing[other] == 0 and len(rows_TLK) >= count and np.array_equal(tokens[other][:count], prefix):
            routed[name][:count] = rows_TLK[:count]
            missing[name] = 0
            return


def merged(parts: Sequence[Mapping[str, Sequence[Span]]]) -> dict[str, Sequence[Span]]:
    """Merge the choices recorded by pipeline stages."""
    merged_spans: dict[str, Sequence[Span]] = {}
    for part in parts:
        for name, part_spans in part.items():
            pairs = zip(merged_spans.get(name, part_spans), part_spans, strict=True)
            merged_spans[name] = [(start, np.maximum(earlier, rows)) for (start, earlier), (_, rows) in pairs]
    return merged_spans


def recorded_shape(model_config: Any) -> tuple[int, int]:
    """(L, K) of a model's record in vLLM."""
    return model_config.get_total_num_hidden_layers(), model_config.get_num_experts_per_tok()


class Recorder:
    """The choices of every router of one worker, by request."""

    def __init__(self, runner: Any) -> None:
        """Listen to the routers of the runner's model. Raises ConfigError where they cannot be listened to."""
        self._shape = recorded_shape(runner.model_config)
        self._chosen: dict[int, np.ndarray] = {}
        """Choices of the forward pass that runs, by layer: [T, K]."""
        self._found: dict[str, list[Span]] = {}
        for layer, router in compat.routers(runner.get_model()).items():
            router.set_capture_fn(partial(self._record, layer))
        self._execute, runner.execute_model = runner.execute_model, self._execute_recording
        self._runner = runner

    def take(self) -> dict[str, list[Span]]:
        """Return the choices since the last call."""
        merged_spans, self._found = self._found, {}
        return merged_spans

    def _record(self, layer: int, chosen: torch.Tensor) -> None:
        self._chosen[layer] = chosen.cpu().numpy().astype(np.int16)  # a copy: kernels may use the memory again

    def _execute_recording(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._chosen = {}
        answer = self._execute(scheduled, *args, **kwargs)
        if self._chosen and scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        return answer

    def _keep(self, scheduled: Any) -> None:
        rows = np.full((scheduled.total_num_scheduled_tokens, *self._shape), -1, np.int16)
        for layer, chosen in self._chosen.items():
            rows[:, layer] = chosen[: len(rows)]
        starts = compat.computed_before(scheduled)
        at = 0
        for request in self._runner.input_batch.req_ids:  # in the order of the rows
            count = scheduled.num_scheduled_tokens[request]
            name = compat.request_name(request)
            self._found.setdefault(name, []).append((starts[request], rows[at : at + count]))
            at += count

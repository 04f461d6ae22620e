"""Recording which experts each token is routed to, where vLLM does not do it itself: on its CPU platform.

vLLM's own record (`enable_return_routed_experts`) is wired to a model runner that has no CPU form. What it hangs on is
there on CPUs too: every router calls a function with its choice. Runs in the engine's worker process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from rlctl.backends.vllm import compat
from rlctl.backends.vllm.routed import Span


class Recorder:
    """The choices of every router of one worker, by request."""

    def __init__(self, runner: Any) -> None:
        """Listens to the routers of the runner's model. Raises ConfigError where they cannot be listened to."""
        config = runner.model_config
        self._shape = (config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        self._chosen: dict[int, torch.Tensor] = {}
        """Of the forward pass that runs, by layer: [tokens, experts a token]."""
        self._found: dict[str, list[Span]] = {}
        for layer, router in compat.routers(runner.get_model()).items():
            router.set_capture_fn(partial(self._hear, layer))
        self._execute, runner.execute_model = runner.execute_model, self._listening
        self._runner = runner

    def take(self) -> dict[str, list[Span]]:
        """What was recorded since the last time."""
        found, self._found = self._found, {}
        return found

    def _hear(self, layer: int, chosen: torch.Tensor) -> None:
        self._chosen[layer] = chosen.to("cpu", torch.int16)  # a copy: kernels may use the memory again

    def _listening(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._chosen = {}
        answer = self._execute(scheduled, *args, **kwargs)
        if self._chosen and scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        return answer

    def _keep(self, scheduled: Any) -> None:
        """Deal the rows of the forward pass to their requests."""
        rows = np.full((scheduled.total_num_scheduled_tokens, *self._shape), -1, np.int16)
        for layer, chosen in self._chosen.items():
            rows[:, layer] = chosen[: len(rows)].numpy()
        starts = compat.computed_before(scheduled)
        at = 0
        for request in self._runner.input_batch.req_ids:  # in the order of the rows
            count = scheduled.num_scheduled_tokens[request]
            name = compat.request_name(request)
            self._found.setdefault(name, []).append((starts[request], rows[at : at + count]))
            at += count

"""The policy's side for tests of an engine alone: a transformers model whose weights go to the engine whole."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch

from rlctl.backends.vllm.messages import GroupRequest, Sampling
from rlctl.backends.vllm.segment import Segment
from rlctl.checkpoints.fingerprints import fingerprint

PROMPTS = [tuple(3 + (37 * i + 11 * j) % 500 for j in range(20 + 7 * i)) for i in range(4)]


class WholeTensorPolicy:
    """A transformers model, and a segment that holds its tensors whole."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._place(self.tensors())

    def _place(self, tensors: dict[str, torch.Tensor]) -> None:
        self.table: list[tuple[str, str, tuple[int, ...], int]] = []
        offset = 0
        for name, parameter in tensors.items():
            self.table.append((name, "float32", tuple(parameter.shape), offset))
            offset += parameter.numel() * 4
        self.segment = Segment.create(offset)
        weakref.finalize(self, self.segment.unlink)  # also when the tests are interrupted

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def fingerprints(self) -> dict[str, int]:
        """Of every tensor, as a refit would compare them."""
        return {name: fingerprint(tensor, tuple(tensor.shape)) for name, tensor in self.tensors().items()}

    def perturb(self, seed: int) -> None:
        """Change every element of every tensor, enough to show in log-probs."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.02 * noise if parameter.dim() > 1 else 0.1 * noise)

    def write(self) -> None:
        for (_, _, shape, offset), tensor in zip(self.table, self.tensors().values(), strict=True):
            self.segment.view(offset, shape, torch.float32).copy_(tensor)

    def refit(self, engine: Any, version: int, receive: str = "loader") -> None:
        """A complete refit of a hosted engine."""
        self.write()
        self.open(engine, receive)
        engine.call("refit_begin", version)
        engine.call("refit_receive", {"first": 0, "last": len(self.table)})
        engine.call("refit_finish", version)

    def open(self, engine: Any, receive: str = "loader") -> None:
        engine.call("refit_open", {"address": self.segment.address, "table": tuple(self.table), "receive": receive})

    def logprobs(self, prompt: tuple[int, ...], response: list[int], sampling: Sampling) -> torch.Tensor:
        """Log-probs of `response` under the model, of the distribution that `sampling` draws from."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
        if sampling.temperature > 0:
            logits = logits / sampling.temperature
        if sampling.top_k > 0:
            lowest = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, float("-inf"))
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def requests(samples: int = 4, base: int = 0) -> list[GroupRequest]:
    return [
        GroupRequest(index, prompt, tuple(base + 100 * index + sample for sample in range(samples)))
        for index, prompt in enumerate(PROMPTS)
    ]


def generate(engine: Any, sampling: Sampling, wanted: list[GroupRequest] | None = None) -> list[Any]:
    """Groups as (result, columns, texts)."""
    from rlctl.cluster.objects import fetch

    results = engine.call("generate", wanted or requests(), sampling, 60.0)
    return [(result, fetch(result.columns), fetch(result.texts)) for result in results]


def largest_logprob_error(groups: list[Any], policy: WholeTensorPolicy, sampling: Sampling) -> float:
    """Largest difference between the engine's log-probs and the policy's own."""
    worst = 0.0
    for result, columns, _ in groups:
        for row in range(columns.rollouts):
            tokens = columns.tokens_T[columns.slice(row)].tolist()
            prompt, response = tuple(tokens[: result.prompt_tokens]), tokens[result.prompt_tokens :]
            got = torch.tensor(columns.logprobs_T[columns.slice(row)][result.prompt_tokens :])
            worst = max(worst, float((got - policy.logprobs(prompt, response, sampling)).abs().max()))
    return worst

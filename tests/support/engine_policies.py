"""The policy's side for tests of an engine alone: a transformers model whose weights go to the engine whole."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlctl.backends.base import EngineWorker, EpisodeWorker, WeightSource
from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.refit.channels import plan_channels
from rlctl.refit.policy_side import RefitSender
from rlctl.refit.records import SenderSetup, TableRow
from rlctl.transport.rounds import whole_tensors
from rlctl.weights.transfer_plan import SingleWorld, World

PROMPTS = [tuple(3 + (37 * i + 11 * j) % 500 for j in range(20 + 7 * i)) for i in range(4)]


class WholeTensorPolicy(RefitSender, WeightSource):
    """A transformers model on one rank, which this process is, as the sending side of refits."""

    rank = 0

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._place(self.tensors())

    def _place(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(self)
        self.attempts = 0
        self.table = tuple(
            TableRow(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
        self.fail_in_round: int | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def fingerprints(self) -> dict[str, int]:
        """Of every tensor, as a refit would compare them."""
        return {name: fingerprint(tensor, tuple(tensor.shape)) for name, tensor in self.tensors().items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.tensors()

    def layouts(self) -> World:
        return SingleWorld(whole_tensors(self.rows()))

    def rows(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        return tuple((row.name, row.dtype, row.shape) for row in self.table)

    def perturb(self, seed: int) -> None:
        """Change every element of every tensor, enough to show in log-probs."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.add_(0.02 * noise if parameter.dim() > 1 else 0.1 * noise)

    def open(self, engine: Any, receive: str = "loader", staging_bytes: int = 1 << 30) -> None:
        """What a session does when it opens."""
        engine.call(EngineWorker.refit_open, self.rows(), receive)
        needs, place = engine.call(EngineWorker.refit_needs), self.refit_place()
        channels = plan_channels("shared-memory", needs, [place], staging_bytes=staging_bytes, timeout_s=60.0)
        addresses = self.refit_make(channels, (place,), "127.0.0.1").addresses
        weakref.finalize(self, _unlink, list(addresses.values()))  # also when the tests are interrupted
        channels = tuple(replace(c, connection=replace(c.connection, address=addresses[c.index])) for c in channels)
        problems = self.refit_connect(SenderSetup(self.table, (place,), channels))
        assert problems == (), problems
        by_name = {name: c.connection for c in channels for name in c.connection.receivers}
        engine.call(EngineWorker.refit_connect, tuple(by_name[need.name] for need in needs))
        self.refit_unlink()

    def refit(self, engine: Any, version: int, receive: str = "loader", staging_bytes: int = 1 << 30) -> None:
        """A complete refit of a hosted engine."""
        self.open(engine, receive, staging_bytes)
        engine.call(EngineWorker.refit_begin, version)
        self.transfer(engine, version)
        engine.call(EngineWorker.refit_finish, version)

    def transfer(self, engine: Any, version: int) -> None:
        """Both sides at once, this process being one of them."""
        self.attempts += 1
        update = {"version": version, "attempt": self.attempts}
        submitted = engine.submit(EngineWorker.refit_receive, update)
        try:
            self.refit_send(version, self.attempts)
        finally:
            submitted.results()

    def _send_round(self, end: Any, index: int) -> float:
        if index == self.fail_in_round:
            raise ValueError("asked for")
        return super()._send_round(end, index)

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
    results = engine.call(EpisodeWorker.generate, wanted or requests(), sampling, 60.0)
    return [(result, result.columns, result.texts) for result in results]


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


def _unlink(addresses: list[Any]) -> None:
    for address in addresses:
        with suppress(FileNotFoundError):
            os.unlink(address.path)


def choices(model: Any, tokens_T: Any) -> Any:
    """[tokens, layers, experts a token] that the routers of a transformers model choose."""
    heard: list[torch.Tensor] = []
    gates = [m.register_forward_hook(lambda _, __, out: heard.append(out[2])) for m in routers(model)]
    with torch.no_grad():
        model(torch.from_numpy(tokens_T.astype("int64"))[None])
    for gate in gates:
        gate.remove()
    return torch.stack(heard, 1).numpy()


def routers(model: Any) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]

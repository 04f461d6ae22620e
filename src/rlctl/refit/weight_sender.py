"""The calls that a policy rank answers in a refit, and the process that holds a rank and the sender of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rlctl.backends.base import PolicyWorker
from rlctl.cluster.worker_host import imported

if TYPE_CHECKING:
    import numpy as np

    from rlctl.refit.records import Made, SenderPlace, SenderSetup, Sent
    from rlctl.transport.rounds import ChangeSizes, Channel, Lengths
    from rlctl.weights.adapters import AdapterRow


class WeightSender(Protocol):
    """The sending side of a refit on a policy rank, called on all ranks. The receiving side is `WeightReceiver` in
    `backends/base.py`."""

    def refit_place(self) -> SenderPlace: ...

    def refit_make(self, channels: tuple[Channel, ...], places: tuple[SenderPlace, ...], host: str) -> Made:
        """Create staging memory (a channel's first sender) and a store at `host` (rank 0). `places`: of all ranks."""
        ...

    def refit_connect(self, setup: SenderSetup) -> tuple[str, ...]:
        """Open this rank's ends; return what keeps the plans of the channels from writing each element exactly once."""
        ...

    def refit_unlink(self) -> None:
        """Once all sides are there: take away the name of the staging memory, and let nobody else reach the store."""

    def refit_send(self, version: int, attempt: int) -> Sent:
        """Send this rank's boxes as `version`, from the live parameters; `attempt` numbers the session's attempts."""
        ...

    def refit_find_changes(self) -> list[ChangeSizes]:
        """Find what has changed since the last refit, by channel; it is kept for `refit_send_changes`."""
        ...

    def refit_send_changes(self, version: int, attempt: int, lengths: tuple[Lengths, ...]) -> Sent:
        """Send what `refit_find_changes` found; `lengths`: by channel, the bytes of each sender in each round."""
        ...

    def refit_publish(self, version: int) -> None:
        """If the transport stores versions: make `version` visible once every rank has written."""

    def refit_retire(self, version: int | None) -> None:
        """If the transport stores versions: remove the other versions (None: all) once every engine has loaded."""

    def refit_fingerprints(self, tensors: list[str] | None = None, merged: bool = False) -> dict[str, int]:
        """Fingerprints of this rank's share of each tensor (None: all) in the engine's dtype; the shares add up.
        `merged`: with adapters, of the weights that the policy computes with, also where the base is sent."""
        ...

    def refit_perturb(self, seed: int, scale: float, share: float = 1.0) -> None:
        """Change a share of the elements by noise that replicas share. For tests of a refit, never in a run."""

    def refit_values(self, tensor: str) -> list[tuple[list[tuple[int, int, int]], np.ndarray]]:
        """This rank's boxes of one tensor: (start, count, step) of each dimension, and the values as float32."""
        ...

    def refit_copy_gb_per_s(self, size: int) -> float | None:
        """Speed of copying `size` bytes within the memory of rank 0's weights; None on other ranks."""
        ...

    def refit_close(self) -> None:
        """Let go of the staging memory and of every connection."""


class AdapterSender(WeightSender, Protocol):
    """The sending side for adapters that go to the engines without the weights that they sit on."""

    def refit_adapters(self) -> tuple[AdapterRow, ...]:
        """Return the adapters of all ranks, before `refit_make` and after each change of the ranks. Collective."""
        ...


class PolicyProcess:
    """One process of a policy that can refit engines: its rank, and the senders of its weights and adapters."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank
        self._senders: dict[int, WeightSender] = {}
        self._adapter_senders: dict[int, AdapterSender] = {}

    def rank(self) -> PolicyWorker:
        return self._rank

    def sender(self, session: int = 0) -> WeightSender:
        """Return the sender of a refit session. Runs of a sweep with their own engines have a session each."""
        from rlctl.refit.policy_side import RefitSender

        if session not in self._senders:
            self._senders[session] = RefitSender(self._rank)
        return self._senders[session]

    def adapter_sender(self, session: int = 0) -> AdapterSender:
        from rlctl.refit.policy_side import SenderOfAdapters

        if session not in self._adapter_senders:
            self._adapter_senders[session] = SenderOfAdapters(self._rank)
        return self._adapter_senders[session]

    def close(self) -> None:
        """Let go of staging memory and leave the process group."""
        for sender in (*self._senders.values(), *self._adapter_senders.values()):
            sender.refit_close()
        self._rank.close()


def policy_process(worker: str, **kwargs: Any) -> PolicyProcess:
    """Start one rank of a policy: the worker of a backend (`PolicyBackend.worker`), built from `kwargs`."""
    import rlctl.refit.policy_side  # noqa: F401 - slow, so while other processes start

    return PolicyProcess(imported(worker)(**kwargs))

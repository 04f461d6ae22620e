"""The policy worker that can refit: Megatron's worker with the source side of a refit."""

from __future__ import annotations

from rlctl.backends.megatron.weights import policy_world
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.refit.records import SourceSetup
from rlctl.refit.source import RefitSource
from rlctl.weights.plan import World


class RefitPolicyWorker(MegatronWorker, RefitSource):
    """One rank of a Megatron policy that can send its weights."""

    def refit_world(self, setup: SourceSetup) -> World:
        return policy_world(self.spec, self.layer_spec)

    def close(self) -> None:
        """Lets go of staging memory and leaves the process group."""
        self.refit_close()
        super().close()

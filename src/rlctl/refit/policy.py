"""The policy worker that can refit: Megatron's worker with the source side of a refit."""

from __future__ import annotations

from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.refit.records import SourceSetup
from rlctl.refit.source import RefitSource
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.plan import World


class RefitPolicyWorker(RefitSource, MegatronWorker):
    """One rank of a Megatron policy, host of the source side of a refit."""

    def parameters(self):
        """This rank's parameters by name, the live memory."""
        return MegatronWorker.parameters(self)

    def refit_world(self, setup: SourceSetup) -> World:
        return MegatronWorld(setup.facts, setup.parallel)

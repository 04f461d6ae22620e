"""Validation of a run that trains on texts: the loss of texts that it does not train on, by the policy itself."""

from __future__ import annotations

from rlctl.backends.clients import PolicyClient
from rlctl.config.schema import RlctlConfig
from rlctl.rl.algorithms.algorithm import Algorithm, RunLoss
from rlctl.rl.loop import estimate_first, make_batch
from rlctl.rollouts.dataset import HeldOutTexts
from rlctl.rollouts.validation import Validated, Validation
from rlctl.telemetry.metrics import LOSS, flatten


class TextValidation(Validation):
    """Validates by the loss and the metrics of the algorithm."""

    def __init__(self, config: RlctlConfig, data: HeldOutTexts, policy: PolicyClient, algorithm: Algorithm) -> None:
        super().__init__(config, LOSS, (data.fingerprint, len(data.rows)))
        self._policy, self._algorithm = policy, algorithm
        self._groups = data.groups()

    def measure(self, version: int) -> Validated:
        policy, loss = self._policy, RunLoss(self._algorithm)
        batch = make_batch(self._groups, self._algorithm, 1)
        estimate_first(policy, self._algorithm, batch)
        policy.load_batch(batch)
        for column in sorted(self._algorithm.needs):
            policy.add_logprobs(column)
        results = policy.evaluate(len(batch.minibatches), loss)
        metrics = {LOSS: sum(result.loss for result in results), **dict(flatten(loss.metrics(results)))}
        self._compare(metrics[LOSS])
        return Validated(metrics, self._groups)

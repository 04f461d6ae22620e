"""Validation of a run that trains on texts: the loss of texts that it does not train on, by the policy itself, and
answers of engines to some of their prompts."""

from __future__ import annotations

from collections.abc import Callable

from rlctl.backends.clients import PolicyClient, generate_groups
from rlctl.data.rollouts import RolloutGroup
from rlctl.refit.records import RefitReport
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.dataset import HeldOutTexts
from rlctl.rollouts.scored_groups import scored
from rlctl.rollouts.validation import Validated, Validation, validation_sampling
from rlctl.settings.config import TextConfig
from rlctl.settings.rewards import RewardConfig
from rlctl.telemetry.metrics import LOSS, flatten
from rlctl.training.method import Method
from rlctl.training.run_loss import RunLoss
from rlctl.training.train_batch import run_pass_before


class TextValidation(Validation):
    """Validates by the loss and the metrics of the method. Where there are engines, they answer prompts with the
    weights of the time, for people to read."""

    def __init__(
        self,
        config: TextConfig,
        data: HeldOutTexts,
        policy: PolicyClient,
        method: Method,
        sync: WeightSync | None,
        refitted: Callable[[RefitReport], None],
    ) -> None:
        """`sync` None: there are no engines. `refitted` receives their first weights."""
        super().__init__(config, LOSS, (data.fingerprint, len(data.rows)))
        self._policy, self._method, self._data, self._sync = policy, method, data, sync
        self._texts = config
        self._refitted: Callable[[RefitReport], None] | None = refitted
        self._groups = data.groups()
        if sync is not None:
            sync.to_policy()

    def measure(self, version: int) -> Validated:
        policy, loss = self._policy, RunLoss(self._method)
        batch = self._method.train_batch(self._groups, 1)
        run_pass_before(policy, self._method, batch)
        policy.load_batch(batch)
        for column in sorted(self._method.needs):
            policy.add_logprobs(column)
        results = policy.evaluate(len(batch.minibatches), loss)
        metrics = {LOSS: sum(result.loss for result in results), **dict(flatten(loss.metrics(results)))}
        self._compare(metrics[LOSS])
        return Validated(metrics, len(self._groups), tuple(self._answers(version)))

    def _answers(self, version: int) -> list[RolloutGroup]:
        sync = self._sync
        if sync is None:
            return []
        report = sync.refit(version)
        if self._refitted is not None:
            self._refitted(report)
            self._refitted = None
        requests, rows = self._data.asked(self._config.run.seed)
        with sync.generating():
            results = generate_groups(
                sync.engines,
                requests,
                validation_sampling(self._texts, self._data.stream.encoder),
                self._config.cluster.step_limit_s,
                lambda error: sync.recover(error, version),
            )
            sync.engines.forget_prompts()
        seeds = {request.group: request.seeds for request in requests}
        return scored(None, results, rows, seeds, RewardConfig())[0]

"""The policy as the loop sees it: one object for all its processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.backends.base import (
    BatchShard,
    LogprobColumn,
    LogprobStats,
    MinibatchResult,
    PolicySpec,
    TokenLoss,
    only_result,
)
from rlctl.backends.packing import PackingStats, plan_batch
from rlctl.cluster.objects import fetch
from rlctl.cluster.workers import WorkerGroup
from rlctl.config.schema import TrainingConfig
from rlctl.rl.batch import TrainBatch


class Policy:
    """Drives the ranks of a policy; every call is collective over them."""

    def __init__(
        self, group: WorkerGroup, spec: PolicySpec, training: TrainingConfig, *, micro_batch_tokens: int
    ) -> None:
        """`micro_batch_tokens`: most tokens of a row, at least those of the longest rollout."""
        self.group, self.parallel, self._row_multiple = group, spec.parallel, spec.row_multiple
        self._micro_batch_tokens = micro_batch_tokens
        self._batching = {
            "packing": training.packing,
            "dynamic": training.dynamic_batching,
            "share_prompts": training.share_prompts,
        }

    def load_hf(self, directory: Path) -> None:
        """Fill the weights from a Hugging Face directory."""
        self.group.call("load_hf", directory)

    def hold_reference(self) -> None:
        """Keep a frozen copy of the current weights as the reference policy."""
        self.group.call("hold_reference")

    def load_batch(self, batch: TrainBatch) -> PackingStats:
        """Give each data-parallel rank its rows; the ranks fetch the columns themselves."""
        plan = plan_batch(
            batch.minibatches,
            batch.columns,
            dp=self.parallel.dp,
            micro_batch_tokens=self._micro_batch_tokens,
            **self._batching,
            multiple=self._row_multiple,
            micro_batch_multiple=self.parallel.micro_batch_multiple,
        )
        shards: Sequence[BatchShard] = [plan.shards[self.parallel.data_rank(rank)] for rank in range(len(self.group))]
        self.group.call_each("load_batch", [(shard, fetch) for shard in shards])
        return plan.stats

    def logprobs(self, column: LogprobColumn) -> LogprobStats:
        """Add the log-probs under the current (or the reference) weights to the loaded batch."""
        return only_result(self.group.call("logprobs", column))

    def train(self, minibatches: int, loss: TokenLoss, lr: float, weight_decay: float) -> list[MinibatchResult]:
        """One optimizer step on each mini-batch of the loaded batch, in order."""
        return [
            only_result(self.group.call("train_minibatch", index, loss, lr, weight_decay))
            for index in range(minibatches)
        ]

    def save_begin(self, directory: Path) -> None:
        """Take a snapshot of policy, optimizer and random state, and start writing it into an existing directory."""
        self.group.call("save_begin", directory)

    def save_written(self) -> bool:
        """Whether `save_finish` would not have to wait."""
        return all(self.group.call("save_written"))

    def save_finish(self) -> dict[str, str]:
        """Wait until the save is complete; returns the digest of each file."""
        return {name: digest for part in self.group.call("save_finish") for name, digest in part.items()}

    def damaged_files(self, directory: Path, digests: dict[str, str]) -> list[str]:
        """What is wrong with the files that a save wrote: a sentence each. Every rank reads a share of them."""
        return [problem for part in self.group.call("damaged_files", directory, digests) for problem in part]

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, under any parallelism."""
        self.group.call("load", directory)

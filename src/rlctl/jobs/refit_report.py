"""The refit test and its report: refit several times with perturbed weights, and compare every tensor and
log-probs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rlctl.backends.base import EngineWorker, WeightReceiver
from rlctl.backends.batching.batch import LogprobStats
from rlctl.backends.clients import EngineClient, only_result
from rlctl.backends.messages import QUANTIZED, GroupRequest, SampledGroup, Sampling
from rlctl.errors import RlctlError
from rlctl.refit.records import RefitReport, Share
from rlctl.refit.session import RefitSession
from rlctl.refit.sync import WeightSync
from rlctl.refit.verify import TensorComparison, assemble, guess
from rlctl.refit.weight_sender import WeightSender

PERTURBATION = 0.02
SPARSE_SHARE = 0.02
# Quantized engines: maximum mean difference of log-probs, as a share of the difference before the refit.
QUANTIZED_SHARE = 0.5
EXPLAINED = 8  # number of wrong tensors whose values are fetched to guess a cause
COPY_BYTES_LIMIT = 1 << 30


@dataclass(frozen=True)
class LogprobLimit:
    """The largest differences between two correct engines of one precision."""

    mean_abs: float
    max_abs: float

    def exceeded(self, stats: LogprobStats | None) -> str:
        """Return a clause about the limit that `stats` exceeds; empty: it exceeds none."""
        if stats is None:
            return "were not compared"
        if not stats.max_abs <= self.max_abs:  # also true for NaN
            return f"differ by up to {stats.max_abs:.2e} (limit {self.max_abs:.0e})"
        if not stats.mean_abs <= self.mean_abs:
            return f"differ by {stats.mean_abs:.2e} on average (limit {self.mean_abs:.0e})"
        return ""


NOT_COMPARED = LogprobLimit(0.0, 0.0)


@dataclass
class RefitTestReport:
    """The findings of a refit test; `to_json` is the documented object."""

    model: str
    mover: str
    receive: str
    logprob_limit: LogprobLimit
    reports: list[RefitReport] = field(default_factory=list)
    comparisons: list[TensorComparison] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    taken: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """(receive path, reason) pairs of each tensor."""
    after: LogprobStats | None = None
    """Differences after the refits, on prompts that the engine's prefix cache contains from earlier weights."""
    stale: LogprobStats | None = None
    """Differences after a perturbation and before the refit, which show that the comparison can fail."""
    limit_gb_per_s: float = 0.0
    synthetic: bool = False
    """The test ran between processes with parameters of reduced width, without an engine and log-probs."""

    @property
    def mismatched(self) -> list[str]:
        return sorted({name for comparison in self.comparisons for name in comparison.mismatched})

    @property
    def missing(self) -> list[str]:
        return sorted({name for comparison in self.comparisons for name in comparison.missing})

    @property
    def extra(self) -> list[str]:
        return sorted({name for comparison in self.comparisons for name in comparison.extra})

    @property
    def unread(self) -> list[tuple[str, str]]:
        """(tensor, reason) for tensors that the engine stores in an unreadable form."""
        return sorted({pair for comparison in self.comparisons for pair in comparison.unread})

    @property
    def problems(self) -> list[str]:
        """One sentence per failure; empty: the test passed."""
        lines = [f"{name} differs: {self.causes.get(name, 'not looked into')}" for name in self.mismatched]
        lines += [f"{name} is missing in the engine" for name in self.missing]
        lines += [f"{name} is in the engine alone" for name in self.extra]
        if not self.synthetic and (problem := self._logprobs_wrong()):
            equal = not (self.mismatched or self.unread)
            hint = " though every tensor is equal: stale prefix cache, or a wrong layout" if equal else ""
            lines.append(f"log-probs {problem}{hint}")
        return lines

    @property
    def quantized(self) -> bool:
        """Whether the engine quantizes some tensors."""
        return any(QUANTIZED in reason for _, reason in self.unread)

    def _logprobs_wrong(self) -> str:
        """Return a clause about differences of log-probs beyond the limit; empty: there are none. Since the effect of
        quantization is not known in advance, a quantized engine must agree better with the policy than before the
        refit."""
        if not (self.quantized and self.after and self.stale):
            return self.logprob_limit.exceeded(self.after)
        limit = QUANTIZED_SHARE * self.stale.mean_abs
        return LogprobLimit(limit, float("inf")).exceeded(self.after)

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and not self.problems

    @property
    def tensor_paths(self) -> list[dict[str, str]]:
        """The receive path of each tensor; several if engine workers store the tensor differently."""
        return [
            {"name": name, "path": path, "reason": reason} for name, of in self.taken.items() for path, reason in of
        ]

    def to_json(self, explain: bool = False) -> dict[str, Any]:
        warm = self.reports[-1]
        speed = warm.gb_per_s
        return {
            "model": self.model,
            "mover": self.mover,
            "receive": self.receive,
            "refits": len(self.reports),
            "tensors": max(comparison.tensors for comparison in self.comparisons),
            "mismatched": [{"name": n, "cause": self.causes.get(n, "not looked into")} for n in self.mismatched],
            "missing": self.missing,
            "extra": self.extra,
            "payload_bytes": warm.bytes,
            "staging_peak_bytes": max(report.staging_bytes for report in self.reports),
            "seconds": seconds_json(warm),
            "seconds_first": seconds_json(self.reports[0]),
            "gb_per_s": speed,
            "limit_gb_per_s": self.limit_gb_per_s,
            "fraction_of_limit": speed / self.limit_gb_per_s if self.limit_gb_per_s else None,
            "logprobs": {key: getattr(self.after, key, None) for key in ("mean_abs", "max_abs", "kl")},
            "logprobs_before": self.stale and {key: getattr(self.stale, key) for key in ("mean_abs", "max_abs", "kl")},
            "unread": [{"name": name, "reason": reason} for name, reason in self.unread],
            "buffers": max(comparison.buffers for comparison in self.comparisons),
            "synthetic": self.synthetic,
            "sent_bytes": warm.sent_bytes,
            "sparse": warm.sparse,
            "verify_seconds": self.verify_seconds[-1],
            "reasons": _reasons(warm.shares),
            "paths": [asdict(share) for share in warm.shares],
            "passed": self.passed,
        } | ({"tensor_paths": self.tensor_paths} if explain else {})


def _reasons(shares: tuple[Share, ...]) -> dict[str, str]:
    by_path: dict[str, list[str]] = {}
    for share in shares:
        by_path.setdefault(share.path, []).append(f"{share.tensors} {share.reason}")
    return {path: "; ".join(reasons) for path, reasons in by_path.items()}


def seconds_json(report: RefitReport) -> dict[str, float]:
    """Return the seconds by phase, and their total."""
    return {phase.value: value for phase, value in report.seconds.items()} | {"total": sum(report.seconds.values())}


def run(
    sync: WeightSync,
    *,
    model: str,
    prompts: list[tuple[int, ...]],
    compare_logprobs: Callable[[list[SampledGroup]], LogprobStats],
    repeat: int,
    logprob_limit: LogprobLimit,
    timeout_s: float,
    new_tokens: int,
    never: tuple[int, ...] = (),
    tell: Callable[[str], None],
) -> RefitTestReport:
    """Refit `repeat` times (at least twice), and compare all tensors and log-probs each time. `compare_logprobs`
    compares the log-probs of engine and policy for the engine's tokens. `never`: tokens that the engine must not
    sample."""
    session = sync.whole

    def generate(version: int) -> list[SampledGroup]:
        with sync.generating():
            return _generate(sync.engines, prompts, version, new_tokens, timeout_s, never)

    test = RefitTestReport(model, session.mover, session.receive, logprob_limit)
    test.limit_gb_per_s = _copy_speed(session, timeout_s)
    for version in range(1, max(2, repeat) + 1):
        if version > 1:
            _perturb(session, version, timeout_s)
            # Fill the prefix cache with the old weights, and measure the difference that a missed refit would leave.
            test.stale = compare_logprobs(generate(version))
        sync.devices.to_weights()
        before = _held(session) if version > 1 else {}
        if version == 1:  # fill the engine with NaN, so that elements without an update are visible
            session.engines.within(timeout_s).call(WeightReceiver.poison)
        report = session.refit(version, verify=False)
        test.reports.append(report)
        test.receive, test.taken = report.receive, session.paths
        tell(f"refit {version}: {sum(report.seconds.values()):.3f} s")
        for comparison in _compared(session, test):
            for name in comparison.mismatched[: EXPLAINED - len(test.causes)]:
                test.causes.setdefault(name, _cause(sync, name, before.get(name)))
        difference = compare_logprobs(generate(version))
        test.after = difference if test.after is None else test.after.joined(difference)
        tell(f"refit {version}: {test.comparisons[-1].tensors} tensors, log-probs within {difference.max_abs:.1e}")
    return test


def _perturb(session: RefitSession, version: int, timeout_s: float) -> None:
    """Change the policy's weights; for sparse refits only a small share of elements, as in training."""
    share = SPARSE_SHARE if session.settings.sparse else 1.0
    session.policy.within(timeout_s).call(WeightSender.refit_perturb, version, PERTURBATION, share)


def _copy_speed(session: RefitSession, timeout_s: float) -> float:
    size = min(session.payload_bytes, COPY_BYTES_LIMIT)
    return only_result(session.policy.within(timeout_s).call(WeightSender.refit_copy_gb_per_s, size))


def run_without_engine(
    session: RefitSession, *, model: str, repeat: int, timeout_s: float, tell: Callable[[str], None] = lambda _: None
) -> RefitTestReport:
    """Refit `repeat` times (at least twice) without an engine, first into poisoned memory, and compare every tensor."""
    test = RefitTestReport(model, session.mover, "direct", NOT_COMPARED, synthetic=True)
    test.limit_gb_per_s = _copy_speed(session, timeout_s)
    session.engines.within(timeout_s).call(WeightReceiver.poison)
    for version in range(1, max(2, repeat) + 1):
        if version > 1:
            _perturb(session, version, timeout_s)
        test.reports.append(session.refit(version, verify=False))
        test.taken = session.paths
        _compared(session, test)
        count, seconds = test.comparisons[-1].tensors, sum(test.reports[-1].seconds.values())
        tell(f"refit {version}: {count} tensors in {seconds:.3f} s, {1e6 * seconds / count:.1f} microseconds a tensor")
    return test


def _compared(session: RefitSession, test: RefitTestReport) -> list[TensorComparison]:
    begun = time.perf_counter()
    comparison = session.compare()
    test.verify_seconds.append(time.perf_counter() - begun)
    test.comparisons += comparison
    return comparison


def _generate(
    engines: EngineClient,
    prompts: list[tuple[int, ...]],
    version: int,
    new_tokens: int,
    timeout_s: float,
    never: tuple[int, ...],
) -> list[SampledGroup]:
    results: list[SampledGroup] = []
    for offset, temperature in ((0, 0.0), (len(prompts), 1.0)):
        requests = [GroupRequest(offset + i, prompt, (1000 * version + i,)) for i, prompt in enumerate(prompts)]
        sampling = Sampling(new_tokens, temperature=temperature, never=never)
        first = engines.generate([requests] * len(engines), sampling, timeout_s)[0]
        if isinstance(first, RlctlError):
            raise first
        results += first
    return results


def _held(session: RefitSession) -> dict[str, int]:
    return {reading.tensor: reading.value for reading in session.engines.call(WeightReceiver.readings)[0]}


def _cause(sync: WeightSync, name: str, before: int | None) -> str:
    session = sync.whole
    row = next((row for row in session.setup.table if row.name == name), None)
    if row is None:
        return "a buffer of the engine, which no refit sends, has changed"
    boxes = session.policy.call(WeightSender.refit_values, name)
    expected = assemble(row.shape, [box for of_rank in boxes for box in of_rank])
    readings = session.engines.call(WeightReceiver.readings, [name])[0]
    now = {reading.value for reading in readings if reading.tensor == name}
    if before is not None and before in now:
        return "stale: still the weights from before the refit"
    by_holder: dict[str, list] = {}
    for holder, start, values in sync.engines.receivers.call(EngineWorker.values, name)[0]:
        box = [(first, count, 1) for first, count in zip(start, values.shape, strict=True)]
        by_holder.setdefault(holder, []).append((box, values))
    for holder, boxes in by_holder.items():
        shape_found = assemble(row.shape, boxes)
        if not (shape_found == expected).all():
            return guess(expected, shape_found) + (f" in {holder}" if len(by_holder) > 1 else "")
    return "replicas differ"

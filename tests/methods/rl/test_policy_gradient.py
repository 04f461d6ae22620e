"""Each built-in algorithm against its paper's objective in plain Python, values and gradients, in float64.

The references know rollouts and tokens, and neither micro-batches nor weights of tokens: what normalizes a batch must
come out of the rows that the driver makes.
"""

from __future__ import annotations

import math
import pickle
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rlctl.backends.batching.batch import TokenBatch
from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.results import add_advantages
from rlctl.errors import ConfigError
from rlctl.methods.available import ALGORITHMS, method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.advantages import PenalizedAdvantages
from rlctl.methods.rl.algorithm import Algorithm, make_batch
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.training.run_loss import RunLoss
from support.groups import group
from support.token_batches import token_batch

GROUPS = [group(0, [1.0, 0.0, 0.6], [3, 5, 2], tokens=[12, 19, 7]), group(1, [0.0, 0.25, 1.0], [1, 4, 2])]
"""Rollouts of 17 response tokens; those of the first group hold the output of a tool as well."""
LENGTHS = [rollout.response_tokens for one in GROUPS for rollout in one.rollouts]
MAX_NEW_TOKENS = 8


def named(name: str, *sets: str) -> Algorithm:
    sets = (f"generation.max_new_tokens={MAX_NEW_TOKENS}", "loss.needs=[old_logprobs,reference_logprobs]", *sets)
    return method_from_config(resolve(flags={"run.algorithm": name}, sets=sets, environment={}).config)


def micro_batch(algorithm: Algorithm, scale: float = 1.0) -> TokenBatch:
    """The whole batch as one micro-batch with random log-probs; `scale` of how far the policies are apart."""
    rows = [row for rows in make_batch(GROUPS, algorithm, 1).minibatches for row in rows]
    assert len(rows) == len(LENGTHS)

    def tokens(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(
            [value for value, n in zip(values, LENGTHS, strict=True) for _ in range(n)], dtype=torch.float64
        )

    batch = token_batch(
        tokens=sum(LENGTHS),
        advantages_R=tokens([row.advantage for row in rows]),
        token_weights_R=tokens([row.token_weight for row in rows]),
        rollout_R=tokens(range(len(rows))).long(),
    )

    def near(logprobs_R: torch.Tensor | None) -> torch.Tensor:
        assert logprobs_R is not None
        return batch.logprobs_R.detach() + scale * (logprobs_R - batch.logprobs_R.detach())

    return replace(
        batch,
        old_logprobs_R=near(batch.old_logprobs_R),
        rollout_logprobs_R=near(batch.rollout_logprobs_R),
        reference_logprobs_R=near(batch.reference_logprobs_R),
    )


class Rollout:
    """A rollout as a paper sees it: its advantage, and the log-probs of its tokens under three policies."""

    def __init__(self, batch: TokenBatch, number: int, now: list[float], advantage: float) -> None:
        own = [i for i, rollout in enumerate(batch.rollout_R.tolist()) if rollout == number]
        assert batch.old_logprobs_R is not None
        assert batch.reference_logprobs_R is not None
        self.A = advantage
        self.now = [now[i] for i in own]
        self.start = [batch.logprobs_R[i].item() for i in own]
        self.old = [batch.old_logprobs_R[i].item() for i in own]
        self.engine = [batch.rollout_logprobs_R[i].item() for i in own]
        self.reference = [batch.reference_logprobs_R[i].item() for i in own]

    @property
    def ratios(self) -> list[float]:
        return [math.exp(now - old) for now, old in zip(self.now, self.old, strict=True)]

    @property
    def weights(self) -> list[float]:
        """Truncated importance weights with the cap 2."""
        return [min(math.exp(old - mu), 2.0) for old, mu in zip(self.old, self.engine, strict=True)]


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def ppo(rollout: Rollout, low: float = 0.2, high: float = 0.2) -> list[float]:
    pairs = zip(rollout.weights, rollout.ratios, strict=True)
    return [-weight * clipped(ratio, rollout.A, low, high) for weight, ratio in pairs]


def cispo(rollout: Rollout) -> list[float]:
    """2506.13585 equation 4: the weight is that of the policy at which the gradient is taken."""
    ratios = [math.exp(start - old) for start, old in zip(rollout.start, rollout.old, strict=True)]
    triples = zip(rollout.weights, ratios, rollout.now, strict=True)
    return [-weight * min(ratio, 5.0) * rollout.A * now for weight, ratio, now in triples]


def dppo(rollout: Rollout) -> list[float]:
    """2602.04879: pi / mu A, but nothing where pi has left mu too far in the direction of A."""
    found = []
    for now, start, mu in zip(rollout.now, rollout.start, rollout.engine, strict=True):
        distance = abs(math.exp(start) - math.exp(mu))
        outwards = (start > mu) if rollout.A > 0 else (start < mu)
        found.append(0.0 if outwards and distance > 0.15 else -math.exp(now - mu) * rollout.A)
    return found


def sapo(rollout: Rollout) -> list[float]:
    """2511.20347."""
    t = 1.0 if rollout.A > 0 else 1.05
    gates = [4 / t / (1 + math.exp(-t * (ratio - 1))) for ratio in rollout.ratios]
    return [-weight * gate * rollout.A for weight, gate in zip(rollout.weights, gates, strict=True)]


def gspo(rollout: Rollout) -> list[float]:
    """2507.18071 equation 5, with a weight of the tokens that the paper does not have set to 1 in the test."""
    mean = sum(now - old for now, old in zip(rollout.now, rollout.old, strict=True)) / len(rollout.now)
    return [-clipped(math.exp(mean), rollout.A, 3e-4, 4e-4)] * len(rollout.now)


def token_mean(losses: list[list[float]]) -> float:
    return sum(sum(tokens) for tokens in losses) / sum(len(tokens) for tokens in losses)


def sequence_mean(losses: list[list[float]]) -> float:
    return sum(sum(tokens) / len(tokens) for tokens in losses) / len(losses)


def mean_of_sums(divisor: float) -> Callable[[list[list[float]]], float]:
    return lambda losses: sum(sum(tokens) / divisor for tokens in losses) / len(losses)


def grpo_advantages() -> list[float]:
    found = []
    for one in GROUPS:
        mean = sum(one.rewards_G) / 3
        std = math.sqrt(sum((reward - mean) ** 2 for reward in one.rewards_G) / 2)
        found += [(reward - mean) / (std + 1e-6) for reward in one.rewards_G]
    return found


def centred() -> list[float]:
    return [reward - sum(one.rewards_G) / 3 for one in GROUPS for reward in one.rewards_G]


def leave_one_out() -> list[float]:
    return [reward - (sum(one.rewards_G) - reward) / 2 for one in GROUPS for reward in one.rewards_G]


def white(values: list[float]) -> list[float]:
    tokens = [value for value, n in zip(values, LENGTHS, strict=True) for _ in range(n)]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
    return [(value - mean) / (std + 1e-6) for value in values]


def rewards() -> list[float]:
    return [reward for one in GROUPS for reward in one.rewards_G]


def dapo_advantages() -> list[float]:
    """With the penalty of equation 13: 8 tokens at most, of which the last 1.6 cost up to 1."""
    assert max(LENGTHS) < 0.8 * MAX_NEW_TOKENS  # none is long enough: `test_advantages.py` has the penalty
    return grpo_advantages()


CASES: dict[str, tuple[Callable[[], list[float]], Callable[[Rollout], list[float]], Callable[..., float]]] = {
    "grpo": (grpo_advantages, ppo, token_mean),
    "dr-grpo": (centred, ppo, mean_of_sums(MAX_NEW_TOKENS)),
    "dapo": (dapo_advantages, lambda rollout: ppo(rollout, 0.2, 0.28), token_mean),
    "rloo": (leave_one_out, ppo, mean_of_sums(1.0)),
    "reinforce++": (lambda: white(rewards()), ppo, token_mean),
    "reinforce++-baseline": (lambda: white(centred()), ppo, token_mean),
    "ppo": (rewards, ppo, token_mean),  # a critic's advantages are made on the ranks: tests/training/test_critic.py
    "gspo": (grpo_advantages, gspo, sequence_mean),
    "cispo": (grpo_advantages, cispo, token_mean),
    "dppo": (grpo_advantages, dppo, token_mean),
    "sapo": (grpo_advantages, sapo, sequence_mean),
}


def configured(name: str, *sets: str) -> Algorithm:
    """The algorithm; a sequence's ratio is compared without the weights of tokens, which its paper does not have."""
    return named(name, *(("loss.importance_correction=off",) if name == "gspo" else ()), *sets)


def test_every_algorithm_has_a_reference() -> None:
    assert CASES.keys() | {"distillation"} == ALGORITHMS.keys()  # test_distillation.py has that one


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_paper(name: str, scale: float) -> None:
    """`scale`: far apart, where bounds act, and close, where those of gspo do not."""
    algorithm = configured(name)
    batch = micro_batch(algorithm, scale)
    advantages, losses, average = CASES[name]

    def objective(now: list[float]) -> float:
        found = [losses(Rollout(batch, n, now, advantage)) for n, advantage in enumerate(advantages())]
        return average(found)

    loss = RunLoss(algorithm)(batch).loss
    loss.backward()
    now = batch.logprobs_R.tolist()
    assert math.isclose(loss.item(), objective(now), rel_tol=1e-10)
    step = 1e-7 if name == "gspo" else 1e-6
    expected = []
    for i in range(len(now)):
        up, down = list(now), list(now)
        up[i], down[i] = now[i] + step, now[i] - step
        expected.append((objective(up) - objective(down)) / (2 * step))
    assert batch.logprobs_R.grad is not None
    torch.testing.assert_close(batch.logprobs_R.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-8)
    assert batch.logprobs_R.grad.abs().max() > 1e-3


@pytest.mark.parametrize(
    "name", [*CASES, "kl in the reward", "kl and its score term", "entropy", "sequence corrections"]
)
def test_any_split_into_micro_batches_and_ranks_gives_the_same_gradient_and_sums(name: str) -> None:
    """Gradients and metrics are summed over micro-batches and ranks, and nothing divides by their number."""
    further = {
        "kl in the reward": ("loss.kl_coefficient=0.1", "loss.kl_in=reward"),
        "kl and its score term": ("loss.kl_coefficient=0.1", "loss.kl_score_term=true"),
        "entropy": ("loss.entropy_coefficient=0.1",),
        "sequence corrections": (
            "loss.importance_level=sequence", "loss.sequence_mask=[0.8,1.2]", "loss.off_policy_mask=0.05",
        ),
    }  # fmt: skip
    algorithm = named("grpo", *further[name]) if name in further else named(name)
    whole = micro_batch(algorithm)
    whole = replace(whole, entropy_R=whole.entropy_R.requires_grad_())
    expected = RunLoss(algorithm)(whole)
    expected.loss.backward()
    for split in ([[0, 1, 2, 3], [4, 5]], [[5], [0, 2], [1, 3, 4]], [[0], [1], [2], [3], [4], [5]]):
        gradients = {"logprobs_R": torch.zeros_like(whole.logprobs_R), "entropy_R": torch.zeros_like(whole.logprobs_R)}
        total, sums = 0.0, dict.fromkeys(expected.sums, 0.0)
        for part in split:
            places = torch.cat([torch.nonzero(whole.rollout_R == number)[:, 0] for number in part])
            own = {name: value.detach()[places] for name, value in vars(whole).items() if torch.is_tensor(value)}
            numbers = {number: place for place, number in enumerate(part)}
            own["rollout_R"] = torch.tensor([numbers[number] for number in own["rollout_R"].tolist()])
            for column in gradients:
                own[column].requires_grad_()
            output = RunLoss(algorithm)(TokenBatch(**own))
            output.loss.backward()
            total += output.loss.item()
            sums = {kind: value + output.sums[kind].item() for kind, value in sums.items()}
            for column, gradient in gradients.items():
                found = own[column].grad
                gradient[places] += torch.zeros_like(gradient[places]) if found is None else found
        assert math.isclose(total, expected.loss.item(), rel_tol=1e-10)
        assert sums == pytest.approx({kind: value.item() for kind, value in expected.sums.items()}, rel=1e-10)
        for column, gradient in gradients.items():
            wanted = getattr(whole, column).grad
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) if wanted is None else wanted)


@pytest.mark.parametrize("name", CASES)
def test_without_an_advantage_nothing_has_a_gradient(name: str) -> None:
    """What makes it right not to compute such rollouts, but for those of which the driver knows rewards alone."""
    algorithm = named(name)
    assert algorithm.learns_without_advantage == (name == "ppo")
    batch = micro_batch(algorithm)
    batch = replace(batch, advantages_R=torch.zeros_like(batch.advantages_R))
    loss = RunLoss(algorithm)(batch).loss
    loss.backward()
    assert loss.item() == 0
    assert batch.logprobs_R.grad is not None
    assert not batch.logprobs_R.grad.any()


@pytest.mark.parametrize("key", ["loss.kl_coefficient=0.1", "loss.entropy_coefficient=0.1"])
def test_a_penalty_or_a_bonus_is_learned_from_without_an_advantage(key: str) -> None:
    assert named("grpo", key).learns_without_advantage


def test_an_own_loss_is_never_taken_for_one_without_a_gradient() -> None:
    from rlctl.methods.rl.grpo import Grpo

    class Own(Grpo):
        def token_loss(self, batch: TokenBatch) -> torch.Tensor:
            return -batch.logprobs_R

    assert Own(RlConfig()).learns_without_advantage


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_reward_lowers_the_advantage_of_all_tokens_before(estimator: str) -> None:
    algorithm = named("grpo", "loss.kl_coefficient=0.3", "loss.kl_in=reward", f"loss.kl_estimator={estimator}")
    batch = micro_batch(algorithm)
    losses = []
    for number, advantage in enumerate(grpo_advantages()):
        rollout = Rollout(batch, number, batch.logprobs_R.tolist(), advantage)
        d = [reference - old for reference, old in zip(rollout.reference, rollout.old, strict=True)]
        k = {"k1": [-x for x in d], "k2": [x * x / 2 for x in d], "k3": [math.exp(x) - 1 - x for x in d]}[estimator]
        losses.append([])
        for t, (weight, ratio) in enumerate(zip(rollout.weights, rollout.ratios, strict=True)):
            losses[-1].append(-weight * clipped(ratio, advantage - 0.3 * sum(k[t:]), 0.2, 0.2))
    assert math.isclose(RunLoss(algorithm)(batch).loss.item(), token_mean(losses), rel_tol=1e-10)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_with_truncated_sampling_whole_distributions_are_compared_with_the_reference(place: str) -> None:
    """Ratios are of the tokens that are sampled from, and the reference's log-probs of all."""
    algorithm = named("grpo", "loss.kl_coefficient=0.3", f"loss.kl_in={place}", "loss.kl_estimator=k3")
    batch = micro_batch(algorithm)
    assert batch.old_logprobs_R is not None
    left_out = [0.125 * (1 + i % 3) for i in range(len(batch.logprobs_R))]
    full_R = (batch.logprobs_R.detach() - torch.tensor(left_out)).requires_grad_()
    batch = replace(batch, full_logprobs_R=full_R, old_full_logprobs_R=batch.old_logprobs_R - torch.tensor(left_out))
    losses, first = [], 0
    for number, advantage in enumerate(grpo_advantages()):
        rollout = Rollout(batch, number, batch.logprobs_R.tolist(), advantage)
        less = left_out[first : first + len(rollout.now)]
        first += len(less)
        compared = rollout.now if place == "loss" else rollout.old
        d = [reference - (own - k) for reference, own, k in zip(rollout.reference, compared, less, strict=True)]
        penalties = [0.3 * (math.exp(x) - 1 - x) for x in d]
        plain = ppo(rollout)
        if place == "loss":
            losses.append([one + penalty for one, penalty in zip(plain, penalties, strict=True)])
            continue
        pairs = zip(rollout.weights, rollout.ratios, strict=True)
        own = [-w * clipped(q, advantage - sum(penalties[t:]), 0.2, 0.2) for t, (w, q) in enumerate(pairs)]
        losses.append(own)
    loss = RunLoss(algorithm)(batch).loss
    assert math.isclose(loss.item(), token_mean(losses), rel_tol=1e-10)
    (gradient,) = torch.autograd.grad(loss, full_R, allow_unused=True)
    assert (gradient is not None and bool(gradient.any())) == (place == "loss")


class Alone:
    """A group of one rank."""

    @staticmethod
    def size() -> int:
        return 1


@pytest.mark.parametrize("bound", [None, 0.75])
def test_a_penalty_in_the_reward_is_whitened_with_the_reward(bound: float | None) -> None:
    """REINFORCE++ (2501.03262) as verl's `reinforce_plus_plus` has it: the reward stands at the last token, each token
    loses beta k1, the sums to go are whitened over all tokens of the batch. Then NeMo-RL's bounds of advantages."""
    bounds = () if bound is None else (f"advantage.clip_low={-bound}", f"advantage.clip_high={bound}")
    algorithm = named("reinforce++", "loss.kl_coefficient=0.3", *bounds)
    batch, rewards = micro_batch(algorithm), [one.reward for of in GROUPS for one in of.rollouts]
    rollouts = [Rollout(batch, number, batch.logprobs_R.tolist(), 0.0) for number in range(len(LENGTHS))]
    to_go = []
    for rollout, reward in zip(rollouts, rewards, strict=True):
        given = [-0.3 * (old - reference) for old, reference in zip(rollout.old, rollout.reference, strict=True)]
        given[-1] += reward
        to_go.append([sum(given[t:]) for t in range(len(given))])
    every = [value for one in to_go for value in one]
    mean, std = statistics.fmean(every), statistics.pstdev(every)
    losses = []
    for rollout, own in zip(rollouts, to_go, strict=True):
        white = [(value - mean) / (std + 1e-6) for value in own]
        white = white if bound is None else [min(max(value, -bound), bound) for value in white]
        triples = zip(rollout.weights, rollout.ratios, white, strict=True)
        losses.append([-weight * clipped(ratio, value, 0.2, 0.2) for weight, ratio, value in triples])

    def row(first: int, last: int) -> tuple[PackedRow, torch.Tensor]:
        own_R = (batch.rollout_R >= first) & (batch.rollout_R < last)
        names = ("advantages", "token_weights", "rollout_logprobs", "old_logprobs", "reference_logprobs")
        columns = {name: getattr(batch, f"{name}_R")[own_R] for name in names}
        nothing, columns["rollout"] = torch.zeros(0), batch.rollout_R[own_R] - first
        return PackedRow(nothing, nothing, (), 0, nothing, nothing, nothing, columns), batch.logprobs_R[own_R]

    rows = [row(0, 2), row(2, len(LENGTHS))]
    estimate = pickle.loads(pickle.dumps(PenalizedAdvantages(algorithm.config)))
    add_advantages([one for one, _ in rows], estimate, Alone())
    loss = sum(RunLoss(algorithm)(one.token_batch(logprobs_R[None])).loss.item() for one, logprobs_R in rows)
    assert math.isclose(loss, token_mean(losses), rel_tol=1e-6)


def test_log_probs_that_whitened_penalties_need_are_computed_first() -> None:
    config = resolve(flags={"run.algorithm": "reinforce++"}, sets=["loss.kl_coefficient=0.1"], environment={}).config
    assert method_from_config(config, tries_loss=False).needs == {"old_logprobs", "reference_logprobs"}
    for odd in ("advantage.whiten_over=rollouts", "loss.needs=[reference_logprobs]"):
        with pytest.raises(ConfigError, match=odd.split("=")[0]):
            resolve(
                flags={"run.algorithm": "reinforce++"}, sets=["loss.kl_coefficient=0.1", odd], environment={}
            ).require_supported()


def test_the_entropy_bonus_is_part_of_the_loss_with_its_gradient() -> None:
    batch = micro_batch(named("grpo"))
    batch = replace(batch, entropy_R=batch.entropy_R.requires_grad_())
    plain, bonus = (
        RunLoss(algorithm)(batch).loss for algorithm in (named("grpo"), named("grpo", "loss.entropy_coefficient=0.1"))
    )
    (gradient,) = torch.autograd.grad(bonus, batch.entropy_R, retain_graph=True)
    torch.testing.assert_close(gradient, -0.1 * batch.token_weights_R)
    torch.testing.assert_close(bonus, plain - 0.1 * (batch.token_weights_R * batch.entropy_R).sum())


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("loss.kl_coefficient=0.1",),
        ("loss.kl_coefficient=0.1", "loss.kl_score_term=true", "loss.kl_estimator=k1"),
        ("loss.kl_coefficient=0.1", "loss.kl_weight=importance", "loss.kl_estimator=k2"),
        ("loss.importance_level=sequence", "loss.entropy_coefficient=0.1"),
        ("loss.importance_correction=ratio", "loss.positive_nll_weight=0.1"),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_infinite_log_probs_of_left_out_tokens_have_no_gradient(name: str, sets: tuple[str, ...]) -> None:
    """0 times their infinite derivative would be NaN, in the gradient of all weights."""
    algorithm = named(name, *sets)
    batch = micro_batch(algorithm)
    left_out_R = batch.rollout_R == 2
    plain = replace(batch, counted_R=~left_out_R, token_weights_R=torch.where(left_out_R, 0.0, batch.token_weights_R))
    assert batch.old_logprobs_R is not None
    plain = replace(
        plain, full_logprobs_R=batch.logprobs_R - 0.1, old_full_logprobs_R=batch.old_logprobs_R - 0.1
    )  # as with truncated sampling
    trained = ("logprobs_R", "entropy_R", "full_logprobs_R")
    columns = (*trained, "rollout_logprobs_R", "old_logprobs_R", "old_full_logprobs_R", "reference_logprobs_R")
    values = {column: getattr(plain, column).detach() for column in columns}
    gradients = []
    for odd in (None, -math.inf, math.inf, math.nan):
        given = values if odd is None else {k: v.masked_fill(left_out_R, odd) for k, v in values.items()}
        one = replace(plain, **{k: v.clone().requires_grad_(k in trained) for k, v in given.items()})
        loss = RunLoss(algorithm)(one).loss
        assert loss.isfinite()
        found = torch.autograd.grad(loss, [getattr(one, name) for name in trained], allow_unused=True)
        gradients.append([torch.zeros_like(left_out_R) if g is None else g for g in found])
    for own in gradients[1:]:
        torch.testing.assert_close(own, gradients[0])
    assert gradients[0][0].abs().max() > 0


def test_the_likelihood_of_right_rollouts_is_part_of_the_loss() -> None:
    """VAPO (2504.05118): L + mu L_NLL, the mean of -log pi over the tokens of positive rollouts; with its gradient."""
    batch = micro_batch(named("grpo"))
    right = [True, False, True, False, True, True]
    count = sum(n for n, one in zip(LENGTHS, right, strict=True) if one)
    nll_weights = [0.1 / count * one for n, one in zip(LENGTHS, right, strict=True) for _ in range(n)]
    with_nll = replace(batch, nll_weights_R=torch.tensor(nll_weights, dtype=torch.float64))
    plain, loss = (RunLoss(named("grpo"))(one).loss for one in (batch, with_nll))
    likelihoods = [batch.logprobs_R[i].item() for i, own in enumerate(batch.rollout_R.tolist()) if right[own]]
    assert math.isclose(loss.item(), plain.item() - 0.1 * statistics.fmean(likelihoods), rel_tol=1e-10)
    (gradient,) = torch.autograd.grad(loss - plain, batch.logprobs_R)
    torch.testing.assert_close(gradient, -with_nll.nll_weights_R)


def test_left_out_tokens_with_any_values_change_no_sum_over_a_rollout() -> None:
    for sets in (("loss.kl_in=reward",), ("loss.kl_score_term=true",), ("loss.importance_level=sequence",)):
        algorithm = named("gspo", "loss.kl_coefficient=0.1", *sets)
        batch = micro_batch(algorithm)
        left_out_R = batch.rollout_R == 2
        assert batch.reference_logprobs_R is not None
        odd = replace(
            batch,
            counted_R=~left_out_R,
            rollout_logprobs_R=torch.where(left_out_R, -math.inf, batch.rollout_logprobs_R),
            reference_logprobs_R=torch.where(left_out_R, -math.inf, batch.reference_logprobs_R),
        )
        plain = replace(batch, token_weights_R=torch.where(left_out_R, 0.0, batch.token_weights_R))
        torch.testing.assert_close(RunLoss(algorithm)(odd).loss, RunLoss(algorithm)(plain).loss)
        gradients = [torch.autograd.grad(RunLoss(algorithm)(one).loss, batch.logprobs_R)[0] for one in (odd, plain)]
        torch.testing.assert_close(*gradients)

"""Distillation against its formulas in plain Python, in float64; and configurations that ask for it wrongly."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlctl.backends.batching.batch import TeacherSpan, TokenBatch
from rlctl.config.user_code import UserCode
from rlctl.errors import ConfigError
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.algorithm import Algorithm, make_batch
from rlctl.methods.rl.grpo import Grpo
from rlctl.training.method import Method
from rlctl.training.run_loss import RunLoss
from rlctl.training.user_loss import UserLoss, trial
from support.groups import group
from support.token_batches import token_batch

TOKENS, TOP = 9, 4
GROUPS = [group(0, [1.0, 0.0], [3, 2]), group(1, [0.5, 0.5], [4, 1])]


def made(*sets: str, teacher: str | None = "big") -> Algorithm:
    flags = {"run.algorithm": "distillation", **({"teacher.model": teacher} if teacher else {})}
    method = method_from_config(resolve(flags=flags, sets=sets, environment={}).config)
    assert isinstance(method, Algorithm)
    return method


def loss_of(method: Method, batch: TokenBatch) -> torch.Tensor:
    loss_R = method.token_loss(batch)
    assert isinstance(loss_R, torch.Tensor)
    return loss_R


def with_teacher(seed: int = 0) -> TokenBatch:
    """A batch with a teacher's log-probs, of the chosen tokens and of four others."""
    batch = token_batch(TOKENS, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def tops() -> torch.Tensor:
        return torch.log_softmax(torch.randn(TOKENS, 7, generator=generator, dtype=torch.float64), -1)[:, :TOP]

    return replace(
        batch,
        teacher_logprobs_R=batch.logprobs_R.detach() - 0.3 * torch.arange(TOKENS),
        teacher_top_RK=tops(),
        top_logprobs_RK=tops().requires_grad_(),
    )


@pytest.mark.parametrize(("weight", "left_out"), [(0.0, 0.0), (0.7, 0.0), (0.7, 0.25)])
def test_the_sampled_token_is_rewarded_by_the_teacher_s_log_ratio(weight: float, left_out: float) -> None:
    """`left_out`: by how much log-probs over the whole vocabulary are less than those that truncated sampling has."""
    batch = with_teacher()
    if left_out:
        assert batch.old_logprobs_R is not None
        whole_R = batch.logprobs_R.detach() - left_out
        batch = replace(batch, full_logprobs_R=whole_R, old_full_logprobs_R=batch.old_logprobs_R - left_out)
    assert batch.old_logprobs_R is not None
    assert batch.teacher_logprobs_R is not None
    algorithm = made(f"distillation.reward_weight={weight}", "distillation.weight=2", "loss.clip_high=9")
    loss_R = loss_of(algorithm, batch)
    loss_R.sum().backward()
    assert batch.logprobs_R.grad is not None
    for i in range(TOKENS):
        old, engine = batch.old_logprobs_R[i].item(), batch.rollout_logprobs_R[i].item()
        advantage = batch.advantages_R[i].item() + 2 * (batch.teacher_logprobs_R[i].item() - (old - left_out))
        ratio = math.exp(batch.logprobs_R[i].item() - old)
        kept = min(ratio, 10) if advantage > 0 else max(ratio, 0.8)
        w = min(math.exp(old - engine), 2.0)
        assert loss_R[i].item() == pytest.approx(-w * kept * advantage)
        expected = -w * ratio * advantage if kept == ratio else 0.0
        assert batch.logprobs_R.grad[i].item() == pytest.approx(expected)


def test_texts_are_learned_from_by_both_divergences_and_their_likelihood() -> None:
    batch = with_teacher()
    sets = [f"distillation.top_k={TOP}", "distillation.forward_share=0.25", "distillation.weight=2",
            "distillation.sft_weight=0.5"]  # fmt: skip
    flags = {"run.algorithm": "distill", "teacher.model": "big"}
    algorithm = method_from_config(resolve(flags=flags, sets=sets, environment={}).config)
    assert (algorithm.needs, algorithm.teacher_top) == ({"teacher_logprobs"}, TOP)
    loss_R, measured = loss_of(algorithm, batch), algorithm.measure(batch)
    assert batch.teacher_top_RK is not None
    assert batch.top_logprobs_RK is not None
    for i in range(TOKENS):
        t, p = (
            [math.exp(value) for value in logs[i].tolist()] for logs in (batch.teacher_top_RK, batch.top_logprobs_RK)
        )
        mass = sum(t)
        t, p = [value / sum(t) for value in t], [value / sum(p) for value in p]
        kl = sum(0.25 * a * math.log(a / b) + 0.75 * b * math.log(b / a) for a, b in zip(t, p, strict=True))
        assert loss_R[i].item() == pytest.approx(2 * kl - 0.5 * batch.logprobs_R[i].item())
        assert (measured["top_kl"][i].item(), measured["top_mass"][i].item()) == pytest.approx((kl, mass))


@pytest.mark.parametrize(
    ("flags", "sets", "said"),
    [
        ({"run.algorithm": "distill"}, [], "needs a teacher"),
        (
            {"run.algorithm": "distill", "teacher.model": "x"},
            ["distillation.loss=sampled"],
            "no key `loss` in the section `distillation`",
        ),
        ({"run.algorithm": "sft", "teacher.model": "x"}, [], "`train sft` has no section `teacher`"),
        ({"run.algorithm": "sft"}, ["distillation.sft_weight=1"], "no section `distillation`"),
    ],
)
def test_what_does_not_go_with_texts_and_a_teacher_is_refused(
    flags: dict[str, str], sets: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        method_from_config(resolve(flags=flags, sets=sets, environment={}).config)
    assert said in f"{caught.value.message} {caught.value.hint}"


def test_each_step_of_a_batch_compares_the_teacher_with_the_policy_before_the_first() -> None:
    """A ratio to the engine's log-probs does not spare the pass that computes pi_old's, which the advantage holds."""
    algorithm = made("batch.optimizer_steps=2", "loss.importance_correction=ratio")
    assert algorithm.needs == {"old_logprobs", "teacher_logprobs"}
    assert made("loss.importance_correction=ratio").needs == {"teacher_logprobs"}
    batch = with_teacher()  # the policy has moved away from the old one
    assert batch.old_logprobs_R is not None
    assert batch.teacher_logprobs_R is not None
    loss_R = loss_of(algorithm, batch)
    for i in range(TOKENS):
        advantage = batch.advantages_R[i].item() + batch.teacher_logprobs_R[i].item() - batch.old_logprobs_R[i].item()
        ratio = math.exp(batch.logprobs_R[i].item() - batch.rollout_logprobs_R[i].item())
        kept = min(ratio, 1.2) if advantage > 0 else max(ratio, 0.8)
        assert loss_R[i].item() == pytest.approx(-kept * advantage)


@pytest.mark.parametrize("share", [1.0, 0.0, 0.25])
@pytest.mark.parametrize("outside", ["renormalize", "tail"])
def test_the_top_tokens_are_compared_by_kl(share: float, outside: str) -> None:
    batch = with_teacher()
    batch = replace(batch, advantages_R=torch.zeros(TOKENS, dtype=torch.float64))
    algorithm = made(
        "distillation.loss=top-k", f"distillation.top_k={TOP}", f"distillation.forward_share={share}",
        f"distillation.outside={outside}", "distillation.weight=3",
    )  # fmt: skip
    loss_R = loss_of(algorithm, batch)
    assert batch.teacher_top_RK is not None
    assert batch.top_logprobs_RK is not None
    for i in range(TOKENS):
        t, p = (
            [math.exp(value) for value in logs[i].tolist()] for logs in (batch.teacher_top_RK, batch.top_logprobs_RK)
        )
        if outside == "tail":
            t, p = [*t, 1 - sum(t)], [*p, 1 - sum(p)]
        t, p = [one / sum(t) for one in t], [one / sum(p) for one in p]
        forward = sum(a * math.log(a / b) for a, b in zip(t, p, strict=True))
        reverse = sum(b * math.log(b / a) for a, b in zip(t, p, strict=True))
        assert loss_R[i].item() == pytest.approx(3 * (share * forward + (1 - share) * reverse))
    assert torch.autograd.gradcheck(
        lambda logs: loss_of(algorithm, replace(batch, top_logprobs_RK=logs)), batch.top_logprobs_RK
    )


def test_a_token_that_has_all_the_probability_leaves_a_finite_tail() -> None:
    sure = torch.tensor([[0.0, -100.0]] * TOKENS, dtype=torch.float64)
    batch = replace(with_teacher(), teacher_top_RK=sure, top_logprobs_RK=sure.clone().requires_grad_())
    algorithm = made("distillation.loss=top-k", "distillation.outside=tail", "distillation.forward_share=0.5")
    loss = loss_of(algorithm, batch).sum()
    loss.backward()
    assert batch.top_logprobs_RK is not None
    assert batch.top_logprobs_RK.grad is not None
    assert math.isfinite(loss.item())
    assert batch.top_logprobs_RK.grad.isfinite().all()


def test_what_a_step_is_told_of_the_teacher() -> None:
    batch = with_teacher()
    assert batch.old_logprobs_R is not None
    assert batch.teacher_logprobs_R is not None
    for form, names in (("sampled", {"teacher_kl"}), ("top-k", {"teacher_kl", "top_kl", "top_mass"})):
        algorithm = made(f"distillation.loss={form}", f"distillation.top_k={TOP}")
        assert {"teacher_kl", "top_kl", "top_mass"} & {metric.name for metric in algorithm.metrics} == names
        assert algorithm.teacher_top == (TOP if form == "top-k" else 0)
        found = RunLoss(algorithm)(batch).sums
        expected = (batch.old_logprobs_R - batch.teacher_logprobs_R).sum().item()
        assert found["teacher_kl"].item() == pytest.approx(expected)


def test_rewards_are_learned_from_by_their_weight_alone() -> None:
    """Without it no rollout is left out for lack of an advantage."""
    plain, weighed = (made(f"distillation.reward_weight={weight}") for weight in (0, 0.5))
    advantages = [[row.advantage for row in make_batch(GROUPS, one, 1).minibatches[0]] for one in (plain, weighed)]
    assert advantages[0] == [0.0] * 4
    assert advantages[1] == pytest.approx([0.5 * 0.5 / math.sqrt(0.5), -0.5 * 0.5 / math.sqrt(0.5), 0.0, 0.0], rel=1e-5)
    alone = [group(0, [0.0], [3])]  # a single rollout has nothing to be compared with, and is learned from
    assert [row.advantage for row in make_batch(alone, plain, 1).minibatches[0]] == [0.0]


@pytest.mark.parametrize(
    ("flags", "sets", "said"),
    [
        ({"run.algorithm": "distillation"}, (), "needs a teacher"),
        ({"teacher.model": "big"}, (), "the algorithm grpo learns nothing from a teacher"),
        ({}, ("loss.needs=[teacher_logprobs]",), "loss.needs = teacher_logprobs needs a teacher"),
        ({}, ("batch.generations=1",), "set at least 2"),
        (
            {"run.algorithm": "distillation", "teacher.model": "big"},
            ("batch.generations=1", "distillation.reward_weight=1"),
            "set at least 2",
        ),
        (
            {"run.algorithm": "distillation", "teacher.model": "big"},
            ("filter.groups=drop",),
            "filter.groups = drop chooses by rewards",
        ),
        (
            {"run.algorithm": "distillation", "teacher.model": "big"},
            ("advantage.baseline=critic", "advantage.normalize_std=false"),
            "advantage.baseline = critic learns from rewards",
        ),
    ],
)
def test_what_does_not_go_together_is_named(flags: dict[str, str], sets: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        method_from_config(resolve(flags=flags, sets=sets, environment={}).config)


def test_a_run_without_learned_rewards_takes_single_rollouts() -> None:
    assert made("batch.generations=1").config.batch.generations == 1


def test_a_loss_of_the_user_s_own_sees_the_teacher(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def own(batch):\n    return (batch.logprobs_R - batch.teacher_logprobs_R) ** 2\n")
    config = resolve(flags={"teacher.model": "big"}, environment={}).config
    loss = UserLoss(UserCode.read(f"{file}:own", "Loss"))
    assert trial(loss, config.loss, Grpo(config).needs) == ()


@pytest.mark.parametrize("share", [1.0, 0.0, 0.3])
def test_chunks_of_two_tokenizers_are_compared_by_their_means(share: float) -> None:
    """P-KL of NeMo RL: two texts, chunks of one, two and three tokens, and a token whose chunk the teacher has not."""
    generator = torch.Generator().manual_seed(4)

    def probabilities(rows: int) -> torch.Tensor:
        return torch.rand(rows, TOP, generator=generator, dtype=torch.float64) / TOP

    chunk_of = [0, 1, 1, -1, 0, 0, 0, 2, 3]
    text_of = [0, 0, 0, 0, 1, 1, 1, 1, 1]
    places = sorted(set(zip(text_of, chunk_of, strict=True)))
    said = dict(zip(places, probabilities(len(places)).log_softmax(-1), strict=True))
    projected = probabilities(TOKENS).requires_grad_()
    batch = replace(
        token_batch(TOKENS),
        rollout_R=torch.tensor(text_of),
        teacher_top_RK=torch.stack([said[place] for place in zip(text_of, chunk_of, strict=True)]),
        top_logprobs_RK=projected,
        spans=(TeacherSpan(TOP, torch.ones(TOKENS), torch.tensor(chunk_of, dtype=torch.float32)),),
    )
    config = {"run.algorithm": "distill", "teacher.model": "big", "teacher.own_tokenizer": True}
    sets = (f"distillation.forward_share={share}", "distillation.weight=3", "distillation.sft_weight=0.5")

    def loss(*more: str) -> torch.Tensor:
        return loss_of(method_from_config(resolve(flags=config, sets=(*sets, *more), environment={}).config), batch)

    divergence = [0.0, 0.0]
    for text, chunk in places:
        if chunk < 0:
            continue
        own = [row for row, place in enumerate(zip(text_of, chunk_of, strict=True)) if place == (text, chunk)]
        mean = [sum(projected[row, k].item() for row in own) / len(own) for k in range(TOP)]
        log_p = [math.log(value / (sum(mean) + 1e-10) + 1e-10) for value in mean]
        log_t = said[text, chunk].tolist()
        forward = sum(math.exp(t) * (t - p) for t, p in zip(log_t, log_p, strict=True))
        reverse = sum(math.exp(p) * (p - t) for t, p in zip(log_t, log_p, strict=True))
        divergence[text] += share * forward + (1 - share) * reverse
    likelihood = [sum(batch.logprobs_R[row].item() for row in range(TOKENS) if text_of[row] == n) for n in (0, 1)]
    for n, value in enumerate(divergence):
        own_R = batch.rollout_R == n
        assert loss()[own_R].sum().item() == pytest.approx(3 * value - 0.5 * likelihood[n], rel=1e-9)
        balanced = loss("distillation.balanced=true")[own_R].sum().item()
        assert balanced == pytest.approx(-3.5 * likelihood[n], rel=1e-9)
    total = loss("distillation.balanced=true", "distillation.sft_weight=0")[batch.rollout_R == 1].sum()
    (grad,) = torch.autograd.grad(total, projected)
    (plain,) = torch.autograd.grad(loss("distillation.sft_weight=0")[batch.rollout_R == 1].sum(), projected)
    torch.testing.assert_close(grad, plain * (-likelihood[1] / divergence[1]))
    assert torch.autograd.gradcheck(
        lambda probs: loss_of(
            method_from_config(resolve(flags=config, sets=sets, environment={}).config),
            replace(batch, top_logprobs_RK=probs),
        ),
        projected,
    )

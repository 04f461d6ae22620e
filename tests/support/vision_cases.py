"""Texts with no, one and two images for models that read them, the step that a rank takes on them, and the same loss by
transformers, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.backends.batching.batch import MinibatchResult, WeightedSequence
from rlctl.backends.batching.packing import plan_batch
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.data.images import MODEL_INPUTS, ImageProcessor
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.texts import TrainedText
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.rollouts.dataset import columns_of, group_of
from rlctl.settings.training import LoraConfig, OptimizerConfig
from rlctl.training.run_loss import RunLoss
from support.parallel_cases import Case, make_worker, wholes
from support.vision_models import square

IMAGES = (
    (),
    (square("red"),),
    (square("blue", (112, 48)), square("green", (40, 100))),
    (square("yellow", (70, 90)),),
)
"""Of each prompt; two have other sizes than the tower."""
PAIR = 2


@dataclass(frozen=True)
class Written:
    """A prompt by the model's own processor."""

    inputs: dict[str, Tensor]
    text: str


@cache
def written(directory: Path, position: int) -> Written:
    """The prompt as transformers' processor makes it."""
    processor: Any = ImageProcessor.open(directory).processor
    images = IMAGES[position]
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": f"what color is square {position}?"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    return Written(dict(processor(text=[text], images=[list(images)] if images else None, return_tensors="pt")), text)


def answer(position: int, sample: int) -> np.ndarray:
    return np.random.default_rng(10 * position + sample).integers(3, 250, 4 + position + sample)


def texts(directory: Path, position: int) -> list[TrainedText]:
    """A pair of texts with the same prompt, as engines hand them over: expanded tokens and decoded images."""
    processor = ImageProcessor.open(directory)
    own = written(directory, position)
    ids = processor.processor.tokenizer(own.text, add_special_tokens=False)["input_ids"]
    prompt, media = processor.expand(ids, [np.asarray(image) for image in IMAGES[position]])
    assert prompt == own.inputs["input_ids"][0].tolist()
    found = []
    for sample in range(PAIR):
        tokens_T = np.concatenate([prompt, answer(position, sample)]).astype(np.int32)
        found.append(TrainedText(tokens_T, np.arange(len(tokens_T)) >= len(prompt), media=media))
    return found


def sft() -> Any:
    return method_from_config(resolve(flags={"run.algorithm": "sft"}, environment={}).config)


@dataclass(frozen=True)
class VisionCase:
    """How a rank trains."""

    case: Case
    freeze: tuple[str, ...] = ()
    lora: LoraConfig = field(default_factory=LoraConfig)
    never: tuple[int, ...] = ()
    mutual: bool = False
    """Tokens of an image attend to each other, as on GPUs."""
    steps: int = 1
    lr: float = 0.0
    save: Path | None = None
    """Directory for the weights after the steps; the log-probs are computed with these weights."""


def laid_out(case: Case, directory: Path) -> Case:
    """The case, with padded rows for a model whose rollouts cannot be packed."""
    unpacked = bool(facts_in(directory).unpacked)
    return replace(case, packing=False, dynamic=True, share_prompts=False) if unpacked else case


Outcome = tuple[list[MinibatchResult | None], dict[str, Tensor], list[Any], dict[str, Tensor]]


def run_vision(rank: int, given: VisionCase, directory: Path) -> Outcome:
    """Results of steps, the gradient of the last one, what is collected of each rank's rows, and weights."""
    case = laid_out(given.case, directory)
    more: dict[str, Any] = {"freeze": given.freeze} if given.freeze else {}
    worker = make_worker(
        rank, case, directory, own_facts=facts_in(directory), optimizer=OptimizerConfig(clip_grad=0), lora=given.lora,
        never=given.never, **more,
    )  # fmt: skip
    assert worker.model.images is not None
    worker.model.images.mutual = given.mutual
    groups, longest = [], 0
    for position in range(len(IMAGES)):
        own = texts(directory, position)
        longest = max(longest, own[0].prompt_tokens + sum(text.answered_tokens for text in own))
        groups.append(group_of(position, PromptRow(0, "vision", "", None), own, columns_of(own)))
    batch = sft().train_batch(tuple(groups), 1)
    plan = plan_batch(
        batch.minibatches, batch.columns, dp=case.parallel.dp, micro_batch_tokens=longest, packing=case.packing,
        dynamic=case.dynamic, share_prompts=case.share_prompts, multiple=case.parallel.row_multiple,
        micro_batch_multiple=case.parallel.micro_batch_multiple,
    )  # fmt: skip
    assert plan.stats.micro_batches > 1 or case.parallel.dp > 1
    worker.load_batch(plan.shards[case.parallel.data_rank(rank)], list)
    worker.add_logprobs("old_logprobs")
    results = [worker.train_minibatch(0, RunLoss(sft()), given.lr, 0.0) for _ in range(given.steps)]
    if given.save is not None:
        given.save.mkdir(exist_ok=True)
        worker.save_begin(given.save)
        worker.save_finish()
        worker.add_logprobs("old_logprobs")
    logprobs = [(row.columns_R["rollout"], row.columns_R["old_logprobs"], row.targets_R) for row in worker._all_rows()]
    return results, wholes(worker, "grad"), logprobs, wholes(worker, "data")


def reference(
    directory: Path, never: tuple[int, ...] = (), *, mutual: bool = False
) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradient, and all log-probs in order, by transformers' model of each text alone; Gemma 3 is causal unless
    `mutual`. Tokens of `never` have the probability 0."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    losses = []
    for position in range(len(IMAGES)):
        inputs = written(directory, position).inputs
        prompt = inputs["input_ids"].shape[1]
        for sample in range(PAIR):
            own = dict(inputs)
            end = torch.from_numpy(answer(position, sample))[None]
            own["input_ids"] = torch.cat([inputs["input_ids"], end], 1)
            for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
                if name in own:
                    own[name] = torch.cat([own[name], torch.full_like(end, int(name == "attention_mask"))], 1)
            if "token_type_ids" in own and not mutual:
                own["token_type_ids"] = torch.zeros_like(own["token_type_ids"])
            raw = model(**own, use_cache=False).logits[0, prompt - 1 : -1]
            logits = raw.index_fill(1, torch.tensor(never, dtype=torch.long), -torch.inf).log_softmax(-1)
            losses.append(logits.gather(1, end[0, :, None])[:, 0])
    logprobs = torch.cat(losses)
    loss = -logprobs.mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, logprobs.detach()


def rollout_difference(rank: int, case: Case, directory: Path, never: tuple[int, ...], results: list[Any]) -> float:
    """Return the largest difference between the engines' log-probs and a rank's, for the engines' tokens."""
    case = laid_out(case, directory)
    worker = make_worker(rank, case, directory, own_facts=facts_in(directory), never=never)
    columns = {result.group: result.columns for result in results}
    rollouts = tuple(
        WeightedSequence(result.group, row, result.prompt_tokens, tokens, 0.0, 1.0)
        for result in results
        for row, tokens in enumerate(result.tokens)
    )
    plan = plan_batch(
        [rollouts], columns, dp=case.parallel.dp, micro_batch_tokens=max(one.tokens for one in rollouts) + 64,
        packing=case.packing, dynamic=case.dynamic, share_prompts=case.share_prompts,
        multiple=case.parallel.row_multiple, micro_batch_multiple=case.parallel.micro_batch_multiple,
    )  # fmt: skip
    worker.load_batch(plan.shards[case.parallel.data_rank(rank)], list)
    worker.add_logprobs("old_logprobs")
    rows = (row.columns_R for row in worker._all_rows())
    parts = [(one["rollout_logprobs"] - one["old_logprobs"]).abs().max() for one in rows if len(one["old_logprobs"])]
    return max(map(float, parts), default=0.0)  # a rank may compute rows of padding alone


def sampled_alone(directory: Path, tokens: np.ndarray, images: Sequence[Any], never: tuple[int, ...]) -> Tensor:
    """Log-probs of all tokens but the first by transformers' model of one text; Gemma 3 is causal, as vLLM on CPUs."""
    model, processor = transformers_model(directory), ImageProcessor.open(directory).processor
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    inputs: dict[str, Any] = {}
    if images:
        made = processor.image_processor([*images], return_tensors="pt")
        inputs = {name: made[name] for name in MODEL_INPUTS if name in made}
    kinds = (ids == model.config.image_token_id).long()
    if "qwen" in model.config.model_type:
        inputs["mm_token_type_ids"] = kinds
    elif model.config.model_type == "gemma3":
        inputs["token_type_ids"] = torch.zeros_like(kinds)
    with torch.no_grad():
        raw = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
    logprobs = raw.index_fill(1, torch.tensor(never, dtype=torch.long), -torch.inf).log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


@cache
def transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()

"""The one schema: every configuration section, its keys, its defaults and what they mean.

Where a key is `None` by default, the planner decides it (parallelism, batches) or the model does (lengths, dtype).
`rlctl config schema` shows the docstrings of sections and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rlctl.config.files import user_path

MOST = 2**31 - 1
Positive = Annotated[int, Field(gt=0, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Threads = Annotated[int, Field(gt=0, le=4096)]
Bytes = Annotated[int, Field(gt=0, le=2**50)]
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""A time limit. The system calls that wait take no more than 24 days."""
PositiveNumber = Annotated[float, Field(gt=0)]
NonNegativeNumber = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
"""A part of a whole, neither none nor all of it."""
PathText = Annotated[str, AfterValidator(lambda text: str(user_path(text)) if text.startswith("~") else text)]
"""A path, or something else that does not begin with `~`. The shell expands that in no file and in no `--set`."""


class Section(BaseModel):
    """A part of the configuration. It is immutable and refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class PassThrough(Section):
    """A section that takes, in addition to its own keys, every field of a class of the installed Megatron-Core or vLLM.
    The fields are checked where the configuration is resolved (`config.passthrough`)."""

    model_config = ConfigDict(extra="allow")

    @property
    def passed(self) -> dict[str, Any]:
        """Fields that are handed on, by their own names."""
        return dict(self.model_extra or {})


class ModelConfig(Section):
    """The model, its tokenizer, and the length of a rollout."""

    name: PathText | None = None
    """Local Hugging Face directory, or name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: PathText | None = None
    """Directory or hub name of a tokenizer to use instead of the model's own."""
    chat_template: PathText | None = None
    """Jinja chat template to use instead of the model's own: a file, or the text itself."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of training and generation; auto is float32 on a CPU and bfloat16 on a GPU. float16 is eight times as
    fine as bfloat16, and its losses are scaled."""
    convert: bool = True
    """Convert the model once into the checkpoint directory, from which every run with Megatron starts; false: start
    from its own files, as dtensor always does."""
    max_length: Positive | None = None
    """Largest number of tokens of prompt and completion together."""
    max_position_embeddings: Positive | None = None
    """Number of positions of the model, where its config.json says another: what is trained keeps this one."""
    extend_positions: bool = False
    """Train on up to max_length tokens where config.json has fewer positions: the rotary embedding goes on with the
    same frequencies, and what is trained has as many positions as that."""
    rope_scaling: dict[str, Any] = {}
    """Rotary embedding instead of the model's own, by the names of a config.json (rope_type, factor, rope_theta and
    others of its type). With yarn and no `max_position_embeddings`, the model has `factor` times the original ones."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""


DataOrder = Literal["shuffled", "as-written", "difficulty", "pass-rate"]


class DataConfig(Section):
    """The prompts, or the texts to train on: where they come from, and how they are put to the model."""

    name: PathText | None = None
    """`reasoning-gym:<task>`, a .jsonl or .parquet file, or a Hugging Face dataset name."""
    sources: tuple[DataSource, ...] = ()
    """Sources instead of `data.name`: each with `name`, `weight`, and keys of `data` and a `reward` of its own."""
    rows: Literal["prompts", "texts", "pairs", "labels"] = "prompts"
    """Contents of a row: a prompt, whose completions are sampled; a text to train on, as `prompt` and `completion`, as
    chat `messages` or as `text`; a `prompt` with completions `chosen` and `rejected`; or a text with a `label`, true or
    false. The algorithms of texts set it. There are no engines and no rewards but with prompts."""
    train_on: Literal["assistant", "last", "marked", "all"] = "assistant"
    """Tokens of a text with a loss: all messages of the assistant in `messages`, only the last one, what the chat
    template marks by {% generation %}, or all tokens. In rows with a `prompt` it is the completion, or with `all` all
    tokens too, and in those with a `text` all tokens."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """Treatment of a text that is longer than `model.max_length`, or a prompt that leaves no room for a completion:
    refuse the data before the run starts, leave it out, or cut it. A plain `text` loses its end, and a prompt its
    beginning, so that `generation.max_new_tokens` fit; other texts and prompts of environments cannot be cut."""
    special_tokens: Literal["text", "tokens"] = "text"
    """Treatment of texts in prompts, tools, completions and messages of environments that the tokenizer has a control
    token for, such as `<|im_end|>`: ordinary text, or the token. A row with `text` is all that the model reads: there
    they are tokens."""
    params: dict[str, Any] = {}
    """Parameters of a reasoning-gym task, for example `max_terms: 2`."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that holds the reference answer."""
    system_prompt: str | None = None
    """System message in front of every prompt; an empty text suppresses the one of the chat template."""
    prompt_template: str | None = None
    """Text of every prompt, where `{prompt}` and `{column}` stand for columns of the row; with `{{ }}` it is Jinja."""
    prompt_suffix: str | None = None
    """Text appended to every prompt, for example how to state the answer."""
    shuffle: bool = True
    """Shuffle the prompts; `run.seed` fixes their order. With an order by difficulty or pass rate: equal ones."""
    order: DataOrder | None = None
    """Order of a source's prompts in each epoch; unset: shuffled, or as written with `data.shuffle=false`. difficulty:
    easy ones first; pass-rate: from the second epoch on, first those that are solved about half of the time."""
    difficulty_field: str | None = None
    """Field with the difficulty of a row, a number (the higher the harder), or `field.key` inside of a field."""
    size: Positive | None = None
    """Number of prompts to generate (reasoning-gym) or to keep (files and datasets)."""

    @model_validator(mode="after")
    def validate_one_source_or_a_list(self) -> DataConfig:
        if self.name and self.sources:
            raise ValueError("data.name names one source and data.sources lists several: give one of them")
        return self

    @model_validator(mode="after")
    def validate_order_fits_shuffle(self) -> DataConfig:
        if self.order == "shuffled" and not self.shuffle:
            raise ValueError("data.order = shuffled, but data.shuffle = false: give one of them")
        return self


class ValidationData(Section):
    """The prompts of validation. Fields and format that are unset are as in `data`."""

    name: str | None = None
    """Source, as `data.name` names one; unset: the prompts held out, or of a reasoning-gym task other questions than
    those of training."""
    params: dict[str, Any] = {}
    """Parameters of a reasoning-gym task."""
    split: str | None = None
    """Split of a Hugging Face dataset."""
    prompt_field: str | None = None
    """Field that holds the prompt."""
    answer_field: str | None = None
    """Field that holds the reference answer."""
    system_prompt: str | None = None
    """System message in front of every prompt."""
    prompt_template: str | None = None
    """Text around every prompt, with `{prompt}` where it stands."""
    prompt_suffix: str | None = None
    """Text appended to every prompt."""


class RewardTerm(Section):
    """One scorer of the reward."""

    name: str
    """`task`, `exact-match`, `math-verify`, `ifeval`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor of this scorer in the sum."""


class SourceReward(Section):
    """Scorers of the completions of one source."""

    terms: tuple[RewardTerm, ...] = ()
    """Scorers whose weighted sum is the reward."""
    extract: Literal["auto", "last-number", "last-line", "boxed", "answer-tag", "choice", "full"] = "auto"
    """How the answer is taken out of the completion; auto does what the task calls for. `choice` takes the letter of an
    option."""


MODEL = "model:"
"""Beginning of the name of a reward model as a scorer."""
OnError = Literal["stop", "zero", "drop"]


class RewardConfig(SourceReward):
    """Scorers of completions, and what a long completion costs."""

    timeout_s: Seconds = 60.0
    """Longest time that scoring the rollouts of one step may take."""
    on_error: OnError = "drop"
    """Reaction to a function or an environment of yours that fails on a rollout. stop: the run ends; zero: that score
    is 0; drop: the rollout is left out, but the run ends in its first batch, and later where more than 5% of ten
    batches fail."""
    shift: float = 0.0
    """Number that is added to the reward of each rollout before `truncated_factor` and the cost of its length. It is
    learned from, and is not in `reward_mean`. NeMo-RL's `reward_scaling` is this and the weight of a term."""
    overlong_buffer: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of generation.max_new_tokens, at its end, in which each token of a completion costs reward; 0: none. The
    penalty min(0, -exceed / buffer) x overlong_factor is learned from, and is not in `reward_mean`. The longest turn
    of an episode counts."""
    truncated_factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor of the rewards of completions that a limit of length ended. They are learned from as that says, and
    `reward_mean` is without it."""
    overlong_factor: PositiveNumber = 1.0
    """Penalty of a completion that takes all of generation.max_new_tokens."""


class EnvironmentConfig(Section):
    """The environment of rollouts: it answers the model, with tools that the model may call, within these limits. A
    failure in it is treated as `reward.on_error` says."""

    name: PathText | None = None
    """A built-in environment, `path/to/file.py:Class`, or one that an installed package adds; unset: a rollout has one
    turn, unless there are tools."""
    params: dict[str, Any] = {}
    """Arguments of the environment's class."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call, each as `path/to/file.py:function`."""
    tool_format: Literal[
        "auto", "hermes", "llama", "mistral", "deepseek", "deepseek-v3.2", "gpt-oss", "qwen3-coder", "glm", "gemma4",
        "kimi-k2", "minimax-m1", "minimax-m2", "seed-oss", "granite", "phi4", "nemotron-v2", "cohere", "pythonic"
    ] = "auto"  # fmt: skip
    """The format in which the model writes calls; auto finds that of its chat template."""
    append: Literal["template", "raw"] = "template"
    """How the answers of the environment are written: as messages of the chat template, or as they are."""
    thinking: Literal["keep", "template"] = "keep"
    """Whether thoughts (`<think>...</think>`) of earlier turns stay in the context, or go where the chat template takes
    them out: the model then goes on from a new context, and an episode is trained on as several sequences."""
    turns: Positive = 10
    """Largest number of turns of the model."""
    sampled_tokens: Positive | None = None
    """Largest number of tokens that the model writes in all turns together; unset: as many as fit."""
    tool_calls: Positive | None = None
    """Largest number of calls; unset: as many as there are turns for."""
    broken_calls: Positive | None = None
    """Calls that cannot be read or are refused, after which an episode ends; unset: it goes on."""
    no_reward: tuple[Literal["duplicated-thinking", "empty-answer", "malformed-thinking"], ...] = ()
    """Faults that take the reward of a whole episode: a turn whose answer is its thought, no answer at the end, or a
    turn with `<think>`, with `</think>` where no thought has begun or more often, or without it where one has."""
    unwanted_tokens: tuple[NonNegative, ...] = ()
    """Token ids that take the reward of an episode in which the model writes one of them."""
    tool_s: NonNegativeNumber = 0.0
    """Seconds that the environment takes for one answer on average, for the plan."""
    turn_timeout_s: Seconds = 60.0
    """Longest time that the environment may take for one answer."""
    timeout_s: Seconds = 600.0
    """Longest time of an episode."""
    retries: NonNegative = 1
    """How often an episode whose environment failed is played again from its start."""
    memory_gib: PositiveNumber = 4.0
    """Most memory that the process of one episode may take, in GiB."""

    @model_validator(mode="after")
    def validate_thinking(self) -> EnvironmentConfig:
        if self.thinking == "template" and self.append == "raw":
            raise ValueError("environment.thinking=template needs a template: leave environment.append unset")
        return self

    @property
    def wanted(self) -> bool:
        """Whether rollouts have an environment or tools."""
        return bool(self.name or self.tools)


class ValidationConfig(Section):
    """How often and on which prompts the policy is measured while it trains. Validation changes nothing of training."""

    every: NonNegative = 0
    """Interval of validations, in steps; 0: none."""
    at_start: bool = False
    """Validate before the first step too."""
    at_end: bool = False
    """Validate after the last step too, whatever the interval."""
    data: ValidationData = ValidationData()
    holdout: NonNegative = 0
    """Number of prompts that are taken away from training; `run.seed` chooses them, and they are validated on where
    `validation.data.name` is unset."""
    max_prompts: Positive = 256
    """Largest number of prompts of one validation; `run.seed` chooses them."""
    samples: Positive = 1
    """Number of samples of each prompt."""
    answers: NonNegative = 0
    """In a run on texts, the number of held-out texts whose prompts an engine answers at each validation; 0: none, and
    no engine is started."""
    temperature: NonNegativeNumber = 0.0
    """Temperature of sampling; 0 takes the most likely token."""
    reward: tuple[RewardTerm, ...] = ()
    """Scorers of validation; unset: those of the run's reward."""
    stop_after: Positive | None = None
    """End the run after so many validations in a row that were no better than the best one, by `run.keep_best_by` where
    this names a metric of validation, else by the mean reward; unset: never."""

    @property
    def wanted(self) -> bool:
        """Whether a run validates at all."""
        return self.every > 0 or self.at_start or self.at_end

    @model_validator(mode="after")
    def validate_what_can_be_stopped_by(self) -> ValidationConfig:
        if self.stop_after is not None and not self.every:
            raise ValueError("validation.stop_after needs validations: set validation.every")
        if self.answers and not self.wanted:
            raise ValueError("validation.answers needs validations: set validation.every or validation.at_end")
        return self


OBSERVED_TOKENS = 32
"""Tokens of an environment behind a turn of the model, as they are planned."""
VALIDATION_PREFIX = "validation/"
"""In front of the names of validation's metrics, wherever they stand next to others."""


class DataSource(Section):
    """One of several sources of prompts. A key that is unset has the value that `data` or `reward` gives it."""

    name: str
    """As `data.name`."""
    weight: PositiveNumber = 1.0
    """Share of the prompts, in proportion to the weights of the other sources."""
    reward: SourceReward | None = None
    """Scorers of its completions; unset: those of `reward`."""
    params: dict[str, Any] | None = None
    split: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    prompt_suffix: str | None = None
    special_tokens: Literal["text", "tokens"] | None = None
    shuffle: bool | None = None
    order: DataOrder | None = None
    difficulty_field: str | None = None
    size: Positive | None = None

    @model_serializer(mode="wrap")
    def _set_keys(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the keys that are set: a plan and a manifest show no others."""
        return {key: value for key, value in whole(self).items() if value is not None}


MOST_ROLLOUTS = 1_000_000
"""Rollouts of a step whose scalars the driver can hold and the planner can deal out."""


class BatchConfig(Section):
    """Prompts, rollouts and optimizer steps of one step."""

    prompts: Positive = 8
    """Prompts in each step."""
    generations: Positive = 8
    """Rollouts of each prompt (the group); one alone where they are not compared with each other."""
    optimizer_steps: Positive = 1
    """Optimizer steps on each batch (PPO mini-batches)."""
    epochs: Positive = 1
    """Number of times that the optimizer steps of a batch are taken, over the same rollouts (PPO epochs)."""

    @property
    def rollouts(self) -> int:
        """Rollouts in each step."""
        return self.prompts * self.generations

    @model_validator(mode="after")
    def validate_rollouts_of_a_step(self) -> BatchConfig:
        if self.rollouts > MOST_ROLLOUTS:
            raise ValueError(
                f"batch.prompts x batch.generations = {self.rollouts:,} rollouts; a step has at most {MOST_ROLLOUTS:,}"
            )
        return self

    @model_validator(mode="after")
    def validate_batch_splits_into_optimizer_steps(self) -> BatchConfig:
        if self.rollouts % self.optimizer_steps:
            raise ValueError(
                f"batch.prompts x batch.generations = {self.rollouts} rollouts do not split into "
                f"batch.optimizer_steps = {self.optimizer_steps} equal parts"
            )
        return self


class AdvantageConfig(Section):
    """From rewards to the advantages of rollouts."""

    baseline: Literal["mean", "leave-one-out", "none", "critic"] = "mean"
    """Baseline that is subtracted from a reward: the mean of its group, the mean of the group's other rollouts, none,
    or at each token the value that a critic gives it (see the section `critic`)."""
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group."""
    std_of: Literal["group", "others"] = "group"
    """Rewards of that standard deviation: those of the whole group, or those of its other rollouts, where advantages
    stay as they are if these are all equal. NeMo-RL has `others` with its leave-one-out baseline."""
    per_term: bool = False
    """Compute the advantages of each reward term by itself and add them up by the weights of the terms (GDPO)."""
    whiten: bool = False
    """Give the advantages of all tokens of a step's batch the mean 0 and the standard deviation 1."""
    whiten_over: Literal["tokens", "rollouts"] = "tokens"
    """Unit of that mean and standard deviation: tokens, so that long rollouts count more, or rollouts."""
    clip_low: float | None = None
    """Least advantage of a rollout, below which it is cut; unset: none."""
    clip_high: float | None = None
    """Largest advantage of a rollout, above which it is cut; unset: none."""
    malformed_thinking: float | None = None
    """Advantage of the tokens of a turn with `<think>` or `</think>` where its answer stands, whatever its episode has;
    unset: that of its episode."""
    invalid_tool_call: float | None = None
    """Advantage of the tokens of a turn whose call of a tool cannot be read or is refused; unset: that of its episode.
    It goes before `malformed_thinking`."""

    @model_validator(mode="after")
    def validate_where_advantages_are_clipped(self) -> AdvantageConfig:
        if self.baseline == "critic" and (self.clip_low, self.clip_high) != (None, None):
            raise ValueError("advantage.clip_low and advantage.clip_high need a baseline other than critic")
        return self

    @property
    def judges_turns(self) -> bool:
        """Whether turns with a fault have an advantage of their own."""
        return (self.malformed_thinking, self.invalid_tool_call) != (None, None)

    @property
    def compares(self) -> bool:
        """Whether the rollouts of a group are compared with each other."""
        return self.baseline in ("mean", "leave-one-out") or self.normalize_std


LogprobColumn = Literal["old_logprobs", "reference_logprobs", "teacher_logprobs"]
"""Log-probs of response tokens that are computed before training: by the policy's ranks, or by those of a teacher."""


class LossConfig(Section):
    """The policy loss, its KL penalty, and the correction for what the engine computes differently."""

    function: str | None = None
    """Loss of your own, `path/to/file.py:function`, instead of the algorithm's: it takes a TokenBatch and returns the
    loss of each response token."""
    needs: tuple[LogprobColumn, ...] | None = None
    """Log-probs that are computed before training; unset: `old_logprobs` with several optimizer steps a batch (seldom
    with `importance_correction=ratio`), `reference_logprobs` with a KL penalty, `teacher_logprobs` with a teacher."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower bound: the ratio of the policies is clipped at 1 - clip_low. For dppo the largest divergence of tokens that
    become less likely."""
    clip_high: PositiveNumber = 0.2
    """Upper bound: the ratio of the policies is clipped at 1 + clip_high. For dppo the largest divergence of tokens
    that become more likely."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Lower bound c of the loss for negative advantages (dual-clip PPO); unset: off."""
    kl_coefficient: NonNegativeNumber = 0.0
    """Weight of the KL penalty to the reference policy; with 0 no reference model is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence to the reference policy."""
    kl_cap: PositiveNumber | None = None
    """Largest KL penalty of one token, before its weight; unset: no limit."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL penalty: a term of the loss, or of the reward, where the advantage of a token loses the penalty
    of that token and of all that follow it. `advantage.whiten` whitens what is left (REINFORCE++)."""
    kl_weight: Literal["off", "policy", "importance"] = "off"
    """With `kl_in=loss`, the weight of each token's penalty, which has a gradient: the probability of the token under
    the policy, divided by itself without gradient (`policy`: the value stays, and the token is held to account for its
    own penalty), or by that under the engine (`importance`). NeMo-RL has `policy`, and with
    `use_on_policy_kl_approximation` `importance`."""
    kl_score_term: bool = False
    """With `kl_in=loss`, also hold each token to account for the penalty of the tokens that follow it: the gradient of
    the estimator alone leaves that out, and is not the gradient of the KL divergence."""
    entropy_coefficient: NonNegativeNumber = 0.0
    """Weight of the entropy of each token's distribution, which is added to what is maximised."""
    level: Literal["token", "sequence", "constant"] = "token"
    """Unit of the average: all tokens of the batch; sequences, each with the mean of its tokens; or sequences, each
    with the sum of its tokens divided by `length_divisor`."""
    length_divisor: Positive | None = None
    """Divisor of every sequence's sum with `level=constant`; unset: generation.max_new_tokens."""
    importance_correction: Literal["off", "untruncated", "truncated", "masked", "ratio"] = "truncated"
    """Correction for the difference between the engine's and the trainer's log-probs: tokens weigh by the ratio of the
    two probabilities, as it is, truncated at `importance_cap`, or 0 outside of [importance_floor, importance_cap]. With
    `ratio` they have no weight, and the clipped ratio is that of the policy to the engine's log-probs."""
    importance_level: Literal["token", "sequence"] = "token"
    """Unit of that ratio: each token, or the product over the tokens of a rollout, which all of them then have."""
    importance_cap: PositiveNumber = 2.0
    """Upper bound of the importance weight."""
    importance_floor: NonNegativeNumber | None = None
    """Lower bound of the importance weight; unset: with `masked` 1 / importance_cap, with `truncated` none."""
    sequence_mask: tuple[NonNegativeNumber, PositiveNumber] | None = None
    """Bounds of the geometric mean of a rollout's ratios of trainer to engine, for example [0.999, 1.002]; a rollout
    outside of them is not learned from. Unset: off."""
    error_mask: Annotated[float, Field(gt=1)] | None = None
    """Largest mean of exp|log(trainer / engine)| over the tokens of a rollout; a rollout beyond it is not learned from.
    Unset: off."""
    off_policy_mask: PositiveNumber | None = None
    """Largest mean of log(engine / policy) over the tokens of a rollout with a negative advantage, in nats; a rollout
    beyond it is not learned from. Unset: off."""
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence that dppo bounds: total variation, or KL, of the chosen token against all others."""
    sapo_temperature_positive: PositiveNumber = 1.0
    """Temperature of sapo's gate where the advantage is positive."""
    sapo_temperature_negative: PositiveNumber = 1.05
    """Temperature of sapo's gate where the advantage is negative."""
    positive_nll_weight: NonNegativeNumber = 0.0
    """Weight of the negative log-likelihood of rollouts with a positive reward, which is added: its mean over all their
    tokens (VAPO). NeMo-RL has it as `positive_example_nll_weight`."""

    @model_validator(mode="after")
    def validate_bounds_of_importance(self) -> LossConfig:
        floor, cap = self.importance_floor, self.importance_cap
        if floor is not None and floor > cap:
            raise ValueError(f"loss.importance_floor = {floor:g} is above loss.importance_cap = {cap:g}")
        if floor is None and self.importance_correction == "masked" and cap <= 1:
            raise ValueError(
                f"loss.importance_cap = {cap:g} leaves no weight where loss.importance_floor is unset, which is 1 / "
                "importance_cap then: set loss.importance_floor"
            )
        return self

    @model_validator(mode="after")
    def validate_bounds_of_the_sequence_mask(self) -> LossConfig:
        if self.sequence_mask is not None and self.sequence_mask[0] >= self.sequence_mask[1]:
            raise ValueError(f"loss.sequence_mask = {list(self.sequence_mask)}: the lower bound comes first")
        return self


class ModelSizes(Section):
    """The layout of a second model; unset, the planner decides it."""

    tp: Positive | None = None
    """Tensor parallel size."""
    pp: Positive | None = None
    """Pipeline parallel size."""
    cp: Positive | None = None
    """Context parallel size."""
    ep: Positive | None = None
    """Expert parallel size."""
    etp: Positive | None = None
    """Tensor parallel size of the experts."""
    dp: Positive | None = None
    """Data parallel size."""


class RewardModelConfig(ModelSizes):
    """The layout of the reward model that `reward.terms` name (`model:DIR`). It is computed by the policy's training
    engine on the policy's devices; unset, the planner decides."""


class TeacherConfig(ModelSizes):
    """A second model, whose log-probs of the policy's rollouts are learned from. It has the policy's tokenizer, and is
    computed by the policy's training engine on the policy's devices."""

    model: PathText | None = None
    """Local Hugging Face directory, or name on the hub; unset: there is no teacher."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    own_tokenizer: bool = False
    """With `train distill` on plain texts: the teacher may have another tokenizer than the policy. It reads the texts
    by its own, and both are compared where their tokens stand for the same characters."""


class DistillationConfig(Section):
    """The loss of `--algorithm distillation` and of `train distill`, which learn from a teacher."""

    loss: Literal["sampled", "top-k"] = "sampled"
    """Form of the divergence: `sampled` takes log teacher - log policy of the chosen token as its advantage (reverse
    KL), and `top-k` compares the distributions over the teacher's `top_k` most likely tokens."""
    weight: PositiveNumber = 1.0
    """Weight of what is learned from the teacher."""
    reward_weight: NonNegativeNumber = 0.0
    """Weight of the advantages of the rewards, which are added; with 0 rewards are shown, if there are any, and not
    learned from."""
    sft_weight: NonNegativeNumber = 0.0
    """With `train distill`, weight of the negative log-likelihood of the texts, which is added."""
    balanced: bool = False
    """With `train distill`, multiply the divergence of each text by the number that makes it as large as the negative
    log-likelihood of the text."""
    top_k: Annotated[int, Field(gt=0, le=2**20)] = 64
    """With `top-k`, the number of the teacher's most likely tokens at each position; all tokens where the vocabulary
    has no more."""
    forward_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """With `top-k`, the part of KL(teacher || policy) in the loss; the rest of it is KL(policy || teacher)."""
    outside: Literal["renormalize", "tail"] = "renormalize"
    """With `top-k`, the treatment of all other tokens: leave them out and let the `top_k` add up to 1, or count them as
    one further event."""


class PreferenceConfig(Section):
    """The loss of `train dpo` and `train kto`."""

    loss: Literal["dpo", "ipo", "simpo", "orpo"] = "dpo"
    """The formula, by its name in the literature. simpo and orpo compare without a reference model."""
    beta: PositiveNumber = 0.1
    """Weight of the distance to the reference model: the reward of a completion is beta times the log-prob that it has
    more under the policy than under the model that the run began with. With orpo it is the weight of the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With dpo, the part of the pairs whose labels are taken to be wrong (cDPO)."""
    average: bool = False
    """With dpo and ipo, take the mean log-prob of a completion's tokens, not their sum; simpo and orpo always do."""
    target_margin: Annotated[float, Field(ge=0)] = 0.0
    """With simpo, the margin of the rewards that is aimed at (gamma)."""
    precompute: bool = False
    """With dpo and ipo, compute the log-probs of the reference once for all rows, before the first step, and hold no
    second copy of the weights. A row may bring them in the fields `ref_chosen_logps` and `ref_rejected_logps`."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the negative log-prob of the chosen completion, which is added to the loss."""

    good_weight: PositiveNumber = 1.0
    """With `train kto`, weight of the loss of good completions."""
    bad_weight: PositiveNumber = 1.0
    """With `train kto`, weight of the loss of bad completions."""

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with the model that the run began with."""
        return self.loss in ("dpo", "ipo")

    @property
    def holds_reference(self) -> bool:
        """Whether that model is held next to the policy."""
        return self.has_reference and not self.precompute

    @model_validator(mode="after")
    def validate_keys_of_the_loss(self) -> PreferenceConfig:
        of_reference = ["dpo", "ipo"]
        for key, losses in (
            ("label_smoothing", ["dpo"]),
            ("average", of_reference),
            ("precompute", of_reference),
            ("target_margin", ["simpo"]),
        ):
            if getattr(self, key) and self.loss not in losses:
                raise ValueError(f"{key} is for preference.loss = {' or '.join(losses)}, and it is {self.loss}")
        return self


class FilterConfig(Section):
    """Groups and rollouts that are not learned from."""

    groups: Literal["keep", "drop", "replace"] = "keep"
    """Groups whose rollouts all have the same reward, before lengths change it: keep them in the batch, drop them, or
    sample other prompts in their place until the batch is full (dynamic sampling)."""
    max_rounds: Annotated[int, Field(gt=0, le=1000)] = 10
    """Largest number of rounds of sampling in a step with `groups=replace`; the step then trains on what is there. With
    async, a round is `batch.prompts` groups."""
    truncated: Literal["keep", "mask"] = "keep"
    """Rollouts that a limit of length ended: learn from them, or only count their rewards in their group."""
    skip: bool = True
    """Leave out of the training pass the rollouts whose loss has no gradient: those with advantage 0, where neither a
    KL penalty nor an entropy bonus is on. Entropy and `logprob_diff` are then measured on the others."""


class RolloutsConfig(Section):
    """When rollouts are made: before each step, or while the policy trains; and how long one may take."""

    mode: Literal["sync", "async"] = "sync"
    """Make the rollouts of a step while the policy waits (sync), or while it trains on earlier ones (async)."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 1
    """With async, the largest number of versions between the weights under which a group is begun and those that are
    trained on it."""
    uncorrected: bool = False
    """Allow rollouts of older weights without a correction (loss.importance_correction=off): they are trained on as if
    the policy had sampled them."""
    order: Literal["position", "arrival"] = "position"
    """With async, the contents of a batch: the next prompts in their order (position), or the groups that finished
    first, where one that was begun `max_staleness` versions ago is waited for (arrival)."""
    timeout_s: Seconds | None = None
    """Longest time from the first token of a rollout to its last, in both modes and in validation. One that takes
    longer ends with the tokens that it has and the stop reason `timeout`. Unset: half of cluster.step_timeout_s."""


class ChecksConfig(Section):
    """Limits at which a step warns, or the run stops."""

    logprob_diff_warning: PositiveNumber | None = None
    """Mean absolute difference between the engine's and the trainer's log-probs above which a step warns; unset: 1e-4
    for float32, 0.05 for bfloat16, and 0.2 where linear layers compute in float8."""
    logprob_diff_error: PositiveNumber | None = None
    """Mean absolute difference that stops the run; unset: 0.01 for float32, else 0.5."""
    max_skipped_steps: Positive = 5
    """Number of steps in a row without any finite gradient that stops the run."""
    max_steps_without_signal: Positive = 5
    """Number of steps in a row after which it is said that all rollouts of each prompt have the same reward."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained instead of all weights."""

    rank: NonNegative = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveNumber = 32.0
    """Scale of the adapters, as alpha / rank."""
    targets: Annotated[tuple[Literal["attention", "mlp"], ...], Field(min_length=1)] = ("attention", "mlp")
    """Layers with adapters: projections of attention, and of MLPs (dense and shared experts, not routed experts)."""
    exclude: tuple[str, ...] = ()
    """Layers of the targets without adapters, as patterns (`*.out_proj`) of their names in the modules of the backend:
    transformers' for dtensor, Megatron-Core's for megatron."""


class QuantizationConfig(Section):
    """Training that is aware of quantization: policy and engines compute with weights on a coarse grid, held in
    model.dtype, and gradients move the optimizer's float32 weights as if there was none (straight-through)."""

    format: Literal["none", "nvfp4"] = "none"
    """Grid of the weights: nvfp4 has 4-bit numbers (E2M1), a scale (E4M3) for each block along the inputs, and a
    float32 scale for each matrix; activations are not rounded."""
    block: Literal[16, 32] = 16
    """Weights of a row that share a scale; NVFP4's tensor cores take 16."""
    tensors: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Published names of weights that are rounded, as patterns such as `*.mlp.*`. Only linear layers are: embeddings,
    the output layer and routers never are."""
    exclude: tuple[str, ...] = ()
    """Weights among them that are not rounded, as patterns."""


class TrainingConfig(Section):
    """How the policy is trained: backend, parallelism, rows of tokens, memory."""

    backend: str = "auto"
    """The backend that trains, by the name of its record; auto is megatron where that can run what is asked for, and
    else dtensor. dtensor trains transformers' own modules with FSDP2: weights, gradients and states are sharded over
    the data parallel ranks."""
    tp: Positive | None = None
    """Tensor parallel size."""
    pp: Positive | None = None
    """Pipeline parallel size."""
    vpp: Positive | None = None
    """Virtual pipeline stages on each pipeline rank."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage, which also has the embedding; unset: the most even split."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage, which also has the output layer; unset: the most even split."""
    cp: Positive | None = None
    """Context parallel size: number of ranks that share one row of tokens."""
    ep: Positive | None = None
    """Expert parallel size."""
    etp: Positive | None = None
    """Tensor parallel size of the experts."""
    dp: Positive | None = None
    """Data parallel size."""
    replicate: Positive | None = None
    """Number of copies of the weights that FSDP2 keeps (dtensor), each sharded over dp / replicate ranks; unset: 1."""
    sequence_parallel: bool | None = None
    """Split norms and residuals over the tensor parallel ranks (sequence parallelism)."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activations that the backward pass computes again: none, those of attention and norms (selective), or those of
    whole layers (full). With `selective`, `megatron.recompute_modules` can name other parts of a layer (core_attn,
    layernorm, mla_up_proj, mlp, moe, shared_experts)."""
    optimizer_offload: bool | None = None
    """Keep the optimizer's states in host memory; the update brings them to the device, a part at a time."""
    micro_batch_tokens: Positive | None = None
    """Largest number of tokens in one packed row (micro-batch) on one rank."""
    packing: bool = True
    """Pack rollouts of different lengths into one row; false gives each rollout a row of its own."""
    dynamic_batching: bool = False
    """Instead of packing, pad rollouts of similar length to the longest, as many as fit `micro_batch_tokens`."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its rollouts in a row (needs packing); gradients are the same."""
    offload: bool | None = None
    """Move weights and optimizer to host memory while the engines generate; unset: on GPUs that both use. With a
    critic, true also moves policy and critic while the other computes; unset: where both together do not fit."""
    router_replay: bool = False
    """Send each token to the experts that the engine chose for it during generation; the weights of the experts are
    still the policy's."""
    freeze_router: bool = False
    """Do not train the routers of experts; tokens are still routed differently as the layers below change."""
    lora: LoraConfig = LoraConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    threads: Threads | None = None
    """Number of CPU threads of each training process."""
    env: dict[str, str] = {}
    """Environment variables of the training processes."""

    @model_validator(mode="after")
    def validate_one_way_of_batching(self) -> TrainingConfig:
        if self.packing and self.dynamic_batching:
            raise ValueError("training.dynamic_batching replaces training.packing: set training.packing=false")
        return self


class GenerationConfig(Section):
    """How completions are generated: engines, parallelism, sampling, memory."""

    backend: str = "auto"
    """The engine that generates: `vllm`, which `auto` is, or one that an installed package adds."""
    engines: Positive | None = None
    """Number of engines."""
    tp: Positive | None = None
    """Tensor parallel size of one engine."""
    pp: Positive | None = None
    """Pipeline parallel size of one engine."""
    dp: Positive | None = None
    """Number of data parallel replicas in one engine, which share its experts."""
    ep: Positive | None = None
    """Expert parallel size of one engine: 1, or tp x dp."""
    colocated: bool | None = None
    """Generate on the devices that train; false: on devices of their own, where nothing sleeps."""
    devices: Positive | None = None
    """Number of devices that the engines have to themselves, with colocated=false: GPUs, or cores of a CPU."""
    max_new_tokens: Positive = 512
    """Largest number of tokens of a completion; a long prompt may leave fewer of `model.max_length`."""
    mean_length: Positive | None = None
    """Mean length of completions, in tokens, that the planner assumes; unset: half of max_new_tokens."""
    temperature: NonNegativeNumber = 1.0
    """Temperature of sampling; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens whose probabilities add up to this; 1 is all."""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] = -1
    """Sample among the k most likely tokens; -1 is all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample among tokens that are at least this times as likely as the most likely one; 0 is all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, in addition to the model's own end tokens."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Tokens that end a completion, in addition to the model's own end tokens."""
    env: dict[str, str] = {}
    """Environment variables of the engines' processes."""
    memory_fraction: Fraction | None = None
    """Fraction of a GPU's memory that vLLM may use."""
    kv_cache_bytes: Bytes | None = None
    """Size of the KV cache of each GPU of an engine; on a CPU of each engine."""
    max_concurrent: Positive | None = None
    """Largest number of sequences that one engine decodes at once."""
    max_batched_tokens: Positive | None = None
    """Largest number of tokens in one forward pass of an engine."""
    threads: Threads | None = None
    """Number of CPU threads of each engine."""
    plain_parameters: bool = False
    """On a CPU, keep matrices in their published form: refits are faster, decoding is slower."""


class RefitConfig(Section):
    """How new weights are sent to the engines and verified."""

    timeout_s: Seconds = 300.0
    """Longest time of each wait during a refit."""
    verify_every: NonNegative = 50
    """Compare every tensor on the first refit and then at this interval of steps; 0: on the first only."""
    in_flight: Literal["wait", "turns", "keep", "abort"] | None = None
    """Completions that are being generated when a refit is due: wait for them, and for the whole of their episodes;
    wait for the turns that are being generated, whose episodes go on with the new weights; keep them and continue with
    the new weights (each token carries the version that chose it); or abort them. Unset: wait, or turns where the plan
    finds that engines would wait long for tools (`environment.tool_s`)."""
    verify_sample: NonNegative = 8
    """Number of tensors that are compared in every other refit, different ones each time; 0: none."""
    mover: Literal["auto", "shared-memory", "cuda-ipc", "collective", "disk"] = "auto"
    """Mover that carries the bytes; auto chooses by where the engines are."""
    directory: PathText | None = None
    """Directory that every node sees, where the disk mover writes versions."""
    sparse: bool = False
    """Send only the elements that have changed since the previous version."""
    full_every: Positive = 20
    """With `sparse`, the interval of refits at which everything is sent."""
    staging_mb: Annotated[int, Field(gt=0, le=65_536)] | None = None
    """Staging memory of each engine worker, in MiB: two buffers that are filled and read in turn. Where weights are
    sent from rank to rank, the workers of an engine share it. Unset: 16 between processors, where buffers that fit the
    cache are fastest, and 256 between GPUs, where fewer rounds are."""


Rounding = Literal["unbiased", "nearest"]


class OptimizerConfig(PassThrough):
    """Adam. Further keys are fields of Megatron's OptimizerConfig."""

    lr: PositiveNumber = 1e-6
    """Learning rate; with a schedule its highest value. The default of SFT, reward models and distillation on texts is
    1e-5."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the mean of squared gradients."""
    eps: PositiveNumber = 1e-8
    """Constant that is added to the denominator."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay; by default it is decoupled from the gradient (AdamW)."""
    clip_grad: NonNegativeNumber = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    rounding: Rounding = "unbiased"
    """How the optimizer's float32 weights become those that the policy and the engines compute with, in bfloat16 and
    float16: so that their mean is kept, or to the nearest number, which hides steps that are small next to a weight."""


class SchedulerConfig(Section):
    """Learning rate and weight decay over the steps of a run, as in Megatron's OptimizerParamScheduler."""

    warmup_steps: NonNegative = 0
    """Number of steps over which the learning rate rises linearly from `init_lr`."""
    init_lr: NonNegativeNumber = 0.0
    """Learning rate at the start of the warm-up."""
    decay: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "constant"
    """Decay of the learning rate after the warm-up; wsd (warm-up, stable, decay) lets it fall only at the end."""
    decay_steps: Positive | None = None
    """Step at which `min_lr` is reached; unset: run.steps."""
    min_lr: NonNegativeNumber = 0.0
    """Learning rate at the end of the decay."""
    wsd_steps: Positive | None = None
    """Number of steps of the decay at the end of wsd; unset: the last fifth."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    """Form of the decay at the end of wsd."""
    start_weight_decay: NonNegativeNumber | None = None
    """Weight decay of the first step; unset: optimizer.weight_decay in all steps."""
    end_weight_decay: NonNegativeNumber | None = None
    """Weight decay after `weight_decay_steps`."""
    weight_decay_steps: Positive | None = None
    """Number of steps over which the weight decay changes; unset: run.steps."""
    weight_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """Form of the change of the weight decay."""

    @model_validator(mode="after")
    def validate_ends_of_the_weight_decay(self) -> SchedulerConfig:
        if (self.start_weight_decay is None) != (self.end_weight_decay is None):
            raise ValueError("scheduler.start_weight_decay and scheduler.end_weight_decay must be set together")
        if self.weight_decay_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            raise ValueError("scheduler.weight_decay_style = constant needs equal start_ and end_weight_decay")
        return self


class CriticConfig(Section):
    """The value model of `advantage.baseline=critic`, which ppo sets: how it learns, and how advantages are made of its
    values. Betas and epsilon of its Adam, and what passes through to Megatron's, are those of `optimizer`."""

    lr: PositiveNumber = 1e-5
    """Learning rate of the critic; with a schedule its highest value."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay of the critic."""
    clip_grad: NonNegativeNumber = 1.0
    """Largest norm of the critic's gradient; 0 turns clipping off."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning rate and weight decay of the critic over the steps, with the keys of the section `scheduler`."""
    warmup_steps: NonNegative = 0
    """Number of steps at the start of a run in which the critic alone is trained."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of a reward for each token that lies between."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation: 1 learns from whole rollouts, 0 from the value of the next token."""
    value_clip: PositiveNumber | None = 0.2
    """Largest distance from its value before the step at which the value of a token is still moved; unset: no limit."""
    loss_weight: PositiveNumber = 1.0
    """Factor of the critic's loss: half of the mean squared distance from the returns."""


class DdpConfig(PassThrough):
    """Fields of Megatron's DistributedDataParallelConfig: how gradients are stored and reduced."""


class MegatronConfig(PassThrough):
    """Fields of Megatron's TransformerConfig, which replace the values that rlctl would give."""


class VllmConfig(PassThrough):
    """Fields of vLLM's EngineArgs, which replace the values that rlctl would give."""

    @property
    def matrix_bytes(self) -> float | None:
        """Bytes of a weight of the layers where `quantization` makes them narrower; None: it does not."""
        method = str(self.passed.get("quantization") or "")
        widths = {1.0: ("fp8", "int8"), 0.5: ("fp4", "int4", "awq", "gptq")}
        return next((width for width, names in widths.items() if any(name in method for name in names)), None)

    @property
    def cache_element_bytes(self) -> float | None:
        """Bytes of an element of the KV cache where `kv_cache_dtype` names its format; None: it is the model's."""
        name = str(self.passed.get("kv_cache_dtype") or "auto")
        widths = {1.0: ("fp8", "int8"), 2.0: ("bfloat16", "float16"), 4.0: ("float32",)}
        return next((width for width, names in widths.items() if name.startswith(names)), None)

    @property
    def graphs(self) -> bool:
        """Whether decoding is recorded in CUDA graphs."""
        return self.passed.get("enforce_eager") is not True


class ClusterConfig(Section):
    """The machine: nodes, GPUs, Ray, and timeouts."""

    nodes: Annotated[int, Field(gt=0, le=10_000)] | None = None
    """Number of nodes."""
    gpus_per_node: Annotated[int, Field(ge=0, le=16_384)] | None = None
    """Number of GPUs of each node; 0 computes on the CPU."""
    gpu: str = "auto"
    """GPU type (h100, a100, ...), `auto` for the type that this machine has, or `cpu`."""
    ray_address: str | None = None
    """Address of a Ray cluster to join; unset: start one on this machine and stop it at the end."""
    start_timeout_s: Seconds = 600.0
    """Longest time that starting Ray and the workers may take."""
    step_timeout_s: Seconds = 3600.0
    """Longest time of each wait during a step."""
    engine_restarts: NonNegative = 3
    """Number of engines that a run may lose; each is replaced and refitted. With 0 the run ends when one is lost."""

    @model_validator(mode="after")
    def validate_gpus_or_none(self) -> ClusterConfig:
        count = self.gpus_per_node
        if count is not None and self.gpu != "auto" and (self.gpu == "cpu") != (count == 0):
            raise ValueError(
                f"cluster.gpu = {self.gpu}, but cluster.gpus_per_node = {count}: set both for GPUs, or neither"
            )
        return self


LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class RunConfig(Section):
    """Length, directory, seed, checkpoints and logs of a run."""

    algorithm: str = "grpo"
    """Algorithm by its name, or one of your own as `path/to/file.py:Class`. It sets the keys that docs/algorithms.md
    lists for it, and any other source can set them differently."""
    steps: Positive = 100
    """Number of steps of the run; each trains on one batch."""
    epochs: PositiveNumber | None = None
    """Number of times that each row of the data is trained on, in place of `run.steps`."""
    goal: Literal["fast", "safe", "cheap"] = "fast"
    """Aim of the planner: the shortest step (fast), more free memory (safe), or the fewest GPU seconds (cheap)."""
    dir: PathText | None = None
    """Run directory; unset: `runs/<model>-<data>-<time>`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the order of prompts and of sampling, of 32 bits."""
    checkpoint_every: NonNegative | None = None
    """Interval of checkpoints, in steps; 0: only at the end; unset: by time, as `checkpoint_minutes` says."""
    checkpoint_minutes: PositiveNumber = 5.0
    """Time between two checkpoints where `checkpoint_every` is unset. It is longer where saving would otherwise take
    more than 5% of the time of the run."""
    keep_last: Positive | None = None
    """Number of newest checkpoints to keep; unset: one if `keep_best` is set, two where `checkpoint_every` is unset,
    and else all."""
    keep_best: Positive | None = None
    """Number of checkpoints to keep for their value of `keep_best_by`, in addition to the newest."""
    keep_best_by: str = "reward_mean"
    """Metric by which checkpoints are good: `reward_mean` of the step, or `validation/<name>`, such as
    `validation/accuracy`."""
    save_final: bool = True
    """Save a checkpoint at the end."""
    stop_within_s: Seconds = 300.0
    """Longest time that the step under way and its save may take after SIGTERM, SIGUSR1 or SIGHUP. Set it below what
    the sender leaves before it kills; the processes are ended within 15 s more."""
    log_rollouts: NonNegative = 4
    """Number of rollouts of each step that are written to rollouts/."""
    show_samples: NonNegative | None = None
    """Interval of steps with which the best and the worst completion are shown, 0: never; unset: 10 in a terminal."""
    loggers: tuple[LoggerName, ...] | None = None
    """Loggers in addition to metrics.jsonl; unset: tensorboard, and wandb if WANDB_API_KEY is set."""
    project: Annotated[str, Field(min_length=1)] = "rlctl"
    """Name of the project in Weights & Biases and Trackio, and of the experiment in MLflow."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run in loggers; unset: the name of its directory."""


def _changed(section: Section, plain: Section, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield each key of `section` whose value is not that of `plain`, with the value of `plain`."""
    for name in type(section).model_fields:
        value, usual = getattr(section, name), getattr(plain, name)
        if isinstance(value, Section):
            yield from _changed(value, usual, f"{prefix}{name}.")
        elif value != usual:
            yield f"{prefix}{name}", usual


class RlctlConfig(Section):
    """The whole configuration of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    validation: ValidationConfig = ValidationConfig()
    batch: BatchConfig = BatchConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    loss: LossConfig = LossConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    filter: FilterConfig = FilterConfig()
    teacher: TeacherConfig = TeacherConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    distillation: DistillationConfig = DistillationConfig()
    preference: PreferenceConfig = PreferenceConfig()
    training: TrainingConfig = TrainingConfig()
    generation: GenerationConfig = GenerationConfig()
    refit: RefitConfig = RefitConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    ddp: DdpConfig = DdpConfig()
    megatron: MegatronConfig = MegatronConfig()
    vllm: VllmConfig = VllmConfig()
    cluster: ClusterConfig = ClusterConfig()
    checks: ChecksConfig = ChecksConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def validate_metric_of_the_best(self) -> RlctlConfig:
        by, every, saves = self.run.keep_best_by, self.validation.every, self.run.checkpoint_every
        if by == "reward_mean":
            if self.run.keep_best is not None and not self.makes_rollouts:
                raise ValueError(
                    f"run.keep_best = {self.run.keep_best} needs run.keep_best_by = {VALIDATION_PREFIX}loss: a run on "
                    "texts has no rewards"
                )
            return self
        if not by.startswith(VALIDATION_PREFIX) or by == VALIDATION_PREFIX:
            raise ValueError(f"run.keep_best_by = {by} is neither reward_mean nor {VALIDATION_PREFIX}<name>")
        if not every:
            raise ValueError(f"run.keep_best_by = {by} needs validations: set validation.every")
        if saves is not None and saves % every:
            raise ValueError(
                f"run.keep_best_by = {by} needs a validation at each checkpoint: run.checkpoint_every = {saves} is no "
                f"multiple of validation.every = {every}"
            )
        return self

    @model_validator(mode="after")
    def validate_schedules_of_learning_rates(self) -> RlctlConfig:
        critic = self.critic
        schedules = [("", "optimizer.lr", self.optimizer.lr, self.scheduler)]
        for prefix, name, lr, one in [*schedules, ("critic.", "critic.lr", critic.lr, critic.scheduler)]:
            used = {"init_lr": one.warmup_steps > 0, "min_lr": one.decay != "constant"}
            for key in (key for key, has_effect in used.items() if has_effect and getattr(one, key) > lr):
                raise ValueError(
                    f"{prefix}scheduler.{key} = {getattr(one, key):g} is above {name} = {lr:g}, which is the highest "
                    "learning rate of a schedule: lower one or raise the other"
                )
            if used["min_lr"] and one.decay_steps is not None and one.decay_steps <= one.warmup_steps:
                raise ValueError(
                    f"{prefix}scheduler.decay_steps = {one.decay_steps} is not above {prefix}scheduler.warmup_steps = "
                    f"{one.warmup_steps}: the decay begins after the warm-up and ends at step decay_steps"
                )
        return self

    @model_validator(mode="after")
    def validate_keys_of_texts(self) -> RlctlConfig:
        data, plain = self.data, DataConfig()
        if data.train_on != plain.train_on and data.rows != "texts":
            raise ValueError(f"data.train_on = {data.train_on} has no effect: data.rows = {data.rows}")
        if data.too_long == "cut" and self.makes_rollouts and self.environment.wanted:
            raise ValueError(
                "data.too_long = cut does not go with an environment, which writes the prompts of its episodes: drop "
                "leaves out those that are too long"
            )
        plain = PreferenceConfig()
        of_labels = {"beta": self.preference.beta} if data.rows == "labels" else {}
        of_labels |= {key: getattr(self.preference, key) for key in ("good_weight", "bad_weight") if of_labels}
        plain = plain.model_copy(update=of_labels)
        if (data.rows != "pairs" or self.trains_reward_model) and self.preference != plain:
            odd = next(iter(dict(_changed(self.preference, plain, "preference."))))
            what = "a reward model has scores of its own"
            what = what if self.trains_reward_model else f"data.rows = {data.rows} has no preferences"
            raise ValueError(f"{odd} has no effect: {what}")
        return self

    @model_validator(mode="after")
    def validate_what_is_quantized(self) -> RlctlConfig:
        settings = self.training.quantization
        if settings.format == "none":
            if settings != QuantizationConfig():
                odd = next(iter(dict(_changed(settings, QuantizationConfig(), "training.quantization."))))
                raise ValueError(f"{odd} has no effect: training.quantization.format = none")
            return self
        for wrong, why in (
            (self.training.lora.rank > 0, "training.lora.rank > 0 trains adapters of weights that stay"),
            (self.trains_reward_model, "`train rm` trains a model of scores, which no engine computes"),
            (bool(self.vllm.passed.get("quantization")), "vllm.quantization has the engines round the weights again"),
        ):
            if wrong:
                raise ValueError(f"training.quantization.format = {settings.format} does not go with this: {why}")
        return self

    @model_validator(mode="after")
    def validate_pairs_of_an_optimizer_step(self) -> RlctlConfig:
        if self.data.rows in ("pairs", "labels") and self.batch.prompts % self.batch.optimizer_steps:
            raise ValueError(
                f"batch.prompts = {self.batch.prompts} {self.data.rows} do not split into batch.optimizer_steps = "
                f"{self.batch.optimizer_steps} equal parts"
            )
        return self

    @model_validator(mode="after")
    def validate_distillation_on_texts(self) -> RlctlConfig:
        of_texts = {
            "distillation.sft_weight": self.distillation.sft_weight > 0,
            "distillation.balanced": self.distillation.balanced,
            "teacher.own_tokenizer": self.teacher.own_tokenizer,
        }
        if self.run.algorithm != "distill" and (asked := next((key for key, on in of_texts.items() if on), None)):
            raise ValueError(f"{asked} is for `train distill`, whose texts are given and have a likelihood to learn")
        if self.teacher.own_tokenizer and self.distillation.outside == "tail":
            raise ValueError(
                "distillation.outside = tail does not go with teacher.own_tokenizer: a projected distribution has "
                "nothing outside of the teacher's most likely tokens that could be compared"
            )
        return self

    @property
    def teacher_top(self) -> int:
        """Number of a teacher's most likely tokens at each position that distillation compares."""
        compares = self.run.algorithm == "distill" or self.distillation.loss == "top-k"
        return self.distillation.top_k if self.teacher.model and compares else 0

    @property
    def reward_models(self) -> tuple[str, ...]:
        """Names of the reward models that score rollouts, each once."""
        of_sources = [term for one in self.data.sources if one.reward for term in one.reward.terms]
        terms = (*self.reward.terms, *of_sources, *self.validation.reward)
        return tuple(dict.fromkeys(term.name for term in terms if term.name.startswith(MODEL)))

    @property
    def trains_reward_model(self) -> bool:
        """Whether the model has a scalar head in place of logits."""
        return self.run.algorithm == "rm"

    @model_validator(mode="after")
    def validate_answers_of_validation(self) -> RlctlConfig:
        if self.validation.answers and (self.makes_rollouts or self.trains_reward_model):
            why = "a reward model answers nothing" if self.trains_reward_model else "its prompts are answered anyway"
            raise ValueError(f"validation.answers = {self.validation.answers} has no effect: {why}")
        return self

    @model_validator(mode="after")
    def validate_texts_are_not_sampled(self) -> RlctlConfig:
        if not self.makes_rollouts and self.rollouts.mode == "async":
            raise ValueError(f"rollouts.mode = async makes rollouts, and data.rows = {self.data.rows} needs none")
        return self

    @model_validator(mode="after")
    def validate_rollouts_end_before_the_run(self) -> RlctlConfig:
        if self.rollout_timeout_s >= self.cluster.step_timeout_s:
            raise ValueError(
                f"rollouts.timeout_s = {self.rollout_timeout_s:g} is not below cluster.step_timeout_s = "
                f"{self.cluster.step_timeout_s:g}, after which a step fails"
            )
        return self

    @model_validator(mode="after")
    def validate_turns_that_are_judged(self) -> RlctlConfig:
        if not self.advantage.judges_turns:
            return self
        key = f"advantage.{'malformed_thinking' if self.advantage.invalid_tool_call is None else 'invalid_tool_call'}"
        if not self.environment.wanted:
            raise ValueError(f"{key} is for the turns of an environment: set environment.name or environment.tools")
        if self.penalty_in_reward:
            raise ValueError(f"{key} leaves no place for loss.kl_in = reward: set loss.kl_in=loss")
        return self

    @model_validator(mode="after")
    def validate_groups_that_are_compared(self) -> RlctlConfig:
        compared = self.compares_rewards
        if self.batch.generations > 1 or not (compared or self.filter.groups != "keep"):
            return self
        key = "advantage.normalize_std = true" if compared else f"filter.groups = {self.filter.groups}"
        if self.advantage.baseline in ("mean", "leave-one-out"):
            key = f"advantage.baseline = {self.advantage.baseline}"
        raise ValueError(
            f"batch.generations = 1, but {key} compares the rollouts of a prompt: set at least 2, or --algorithm ppo, "
            "which compares none"
        )

    @model_validator(mode="after")
    def validate_whitened_penalties(self) -> RlctlConfig:
        if not self.whitens_penalties:
            return self
        if self.advantage.whiten_over == "rollouts":
            raise ValueError(
                "advantage.whiten_over = rollouts compares an advantage of each rollout, and loss.kl_in = reward gives "
                "each token one of its own: set it to tokens, or loss.kl_in to loss"
            )
        if self.loss.needs is not None and not {"old_logprobs", "reference_logprobs"} <= {*self.loss.needs}:
            raise ValueError(
                "advantage.whiten = true with loss.kl_in = reward needs old_logprobs and reference_logprobs: add them "
                "to loss.needs"
            )
        return self

    @model_validator(mode="after")
    def validate_critic(self) -> RlctlConfig:
        if not self.has_critic:
            if self.critic != CriticConfig():
                odd = dict(_changed(self.critic, CriticConfig(), "critic."))
                plain = " ".join(f"--set {key}={'null' if value is None else value}" for key, value in odd.items())
                raise ValueError(
                    f"{next(iter(odd))} has no effect: advantage.baseline = {self.advantage.baseline} uses no critic "
                    f"(--algorithm ppo does): leave it out, or where the run that is resumed has it, add {plain}"
                )
            return self
        for wrong, why in (
            (self.advantage.normalize_std, "advantage.normalize_std = true compares the rollouts of a prompt; "
             "advantage.baseline = critic compares tokens with their values: set it to false"),
            (self.advantage.per_term, "advantage.per_term = true compares reward terms within a group, and "
             "advantage.baseline = critic learns from their sum: set it to false"),
            (self.advantage.whiten_over == "rollouts", "advantage.whiten_over = rollouts compares an advantage of each "
             "rollout, and advantage.baseline = critic has those of tokens: set it to tokens"),
            (self.training.lora.rank > 0, "training.lora.rank > 0 trains adapters, and advantage.baseline = critic "
             "trains all weights of both models: set it to 0, or use an algorithm without a critic"),
            (self.penalty_in_reward and self.loss.needs is not None and "old_logprobs" not in self.loss.needs,
             "loss.kl_in = reward needs old_logprobs where a critic makes the advantages: add it to loss.needs"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(why)
        return self

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained next to the policy. The planner, the workers and the loop all read this."""
        return self.advantage.baseline == "critic"

    @property
    def penalty_in_reward(self) -> bool:
        """Whether the KL penalty is a part of each token's reward."""
        return self.loss.kl_coefficient > 0 and self.loss.kl_in == "reward"

    @property
    def whitens_penalties(self) -> bool:
        """Whether the ranks whiten the advantages of tokens, which have lost their KL penalties by then; a critic's
        advantages are made there anyway. The advantages of distillation are whitened before a teacher adds to them."""
        penalized = self.penalty_in_reward and self.run.algorithm != "distillation"
        return penalized and self.advantage.whiten and not self.has_critic

    @property
    def makes_rollouts(self) -> bool:
        """Whether engines sample what is trained on; if not, it is read from a dataset."""
        return self.data.rows == "prompts"

    @property
    def new_tokens(self) -> int:
        """The most tokens that come behind a prompt: those of a completion, or of all turns of an episode."""
        new = self.generation.max_new_tokens
        return self.environment.turns * (new + OBSERVED_TOKENS) if self.environment.wanted else new

    @property
    def mean_new_tokens(self) -> float:
        """Tokens behind a prompt that the planner assumes; of an episode, those of half of its turns."""
        mean = self.generation.mean_length or self.generation.max_new_tokens / 2
        return (self.environment.turns + 1) / 2 * (mean + OBSERVED_TOKENS) if self.environment.wanted else mean

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards are compared; if not, a run need not have any."""
        return self.makes_rollouts and (self.run.algorithm != "distillation" or self.distillation.reward_weight > 0)

    @property
    def compares_rewards(self) -> bool:
        """Whether nothing is learned from a prompt whose rollouts all have the same reward."""
        return self.advantage.compares and self.learns_from_rewards

    @model_validator(mode="after")
    def validate_shift_of_a_sum(self) -> RlctlConfig:
        if self.reward.shift and self.advantage.per_term:
            raise ValueError(
                f"reward.shift = {self.reward.shift:g} is added to the sum of the terms, and advantage.per_term = true "
                "compares each term by itself: leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def validate_filter_has_rewards(self) -> RlctlConfig:
        if self.has_critic and self.run.algorithm == "distillation":
            raise ValueError("advantage.baseline = critic learns from rewards, and distillation learns from a teacher")
        if self.filter.groups != "keep" and not self.makes_rollouts:
            raise ValueError(
                f"filter.groups = {self.filter.groups} chooses by rewards, and data.rows = {self.data.rows} has none"
            )
        if self.filter.groups != "keep" and not self.learns_from_rewards:
            raise ValueError(
                f"filter.groups = {self.filter.groups} chooses by rewards, and with distillation.reward_weight = 0 "
                "none are learned from"
            )
        return self

    @property
    def rollout_timeout_s(self) -> float:
        """Longest time from the first token of a rollout to its last."""
        return self.rollouts.timeout_s or self.cluster.step_timeout_s / 2

    @property
    def logprobs_needed(self) -> frozenset[LogprobColumn]:
        """Log-probs that are computed before training. The planner and the training loop both read this. With one
        optimizer step a batch the old policy is the current one, whose log-probs the training pass computes anyway;
        a critic's returns, and advantages that are whitened, hold penalties that must be known before."""
        if self.data.rows == "pairs" and not self.preference.holds_reference:
            return frozenset(self.loss.needs or ()) - {"reference_logprobs"}
        if self.loss.needs is not None:
            return frozenset(self.loss.needs)
        old, penalty = self.batch.optimizer_steps * self.batch.epochs > 1, self.loss.kl_coefficient > 0
        if self.loss.importance_correction == "ratio":  # the ratio is to the engine's: what else needs the trainer's?
            old &= self.penalty_in_reward or self.loss.sequence_mask is not None or self.run.algorithm == "distillation"
        old = old or self.whitens_penalties or (self.has_critic and self.penalty_in_reward)
        columns: dict[LogprobColumn, bool] = {"old_logprobs": old, "reference_logprobs": penalty,
                                              "teacher_logprobs": self.teacher.model is not None}  # fmt: skip
        return frozenset(column for column, needed in columns.items() if needed)

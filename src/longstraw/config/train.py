"""The training configuration: one validated class. Names and defaults follow TRL's."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from longstraw.config.combinations import find_problems
from longstraw.config.dataset import DatasetConfig, EvalConfig
from longstraw.config.model import LoraConfig, ModelConfig
from longstraw.config.refresh import RefreshConfig
from longstraw.config.strict import StrictGroup
from longstraw.objective.policy import PolicyLoss

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: Any) -> Any:
    """'8GiB' or '500 MB' as a number of bytes; anything else as it is, for the type's own check."""
    if isinstance(value, str):
        for unit, size in _UNITS.items():
            number = value.strip().upper().removesuffix(unit).strip()
            if number != value.strip().upper() and number.replace(".", "", 1).isdigit():
                return int(float(number) * size)
    return value


Positive = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


class TrainConfig(StrictGroup):
    """Everything `longstraw train` reads. Raises pydantic.ValidationError, which `load_config` turns into a message."""

    # What is trained, on what, for what
    model: ModelConfig = Field(description="The policy: a path, or a group of options.")
    lora: LoraConfig | None = Field(default=None, description="Train LoRA adapters instead of all parameters.")
    dataset: DatasetConfig = Field(description="The training prompts: a source, or a group of options.")
    reward_funcs: list[str] = Field(
        min_length=1,
        description="'module:function', 'file.py:function' or a sequence-classification model by path; one or a list.",
    )
    reward_weights: list[float] | None = Field(
        default=None, description="One weight a reward function; default 1.0 each."
    )
    eval: dict[str, EvalConfig] = Field(default_factory=dict, description="Held-out sets by name.")
    output_dir: str | None = Field(default=None, description="Run directory; default: runs/DATE-TIME.")

    # Prompts
    max_prompt_length: Positive | None = Field(default=None, description="Drop (and count) prompts of more tokens.")
    min_prompt_length: Positive = Field(default=1, description="Drop (and count) prompts of fewer tokens.")
    skip_bad_rows: bool = Field(
        default=False,
        description="Leave out (log and count) rows that cannot be read, or that the chat template refuses, instead of "
        "stopping at the first.",
    )
    shuffle_dataset: bool = Field(default=True, description="Visit the rows in a random order, another one each epoch.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to apply_chat_template.")
    prompts_per_step: Positive = Field(
        default=1, description="Prompts (groups) sampled together; their states are held at once."
    )
    gradient_accumulation_steps: Positive = Field(
        default=1,
        description="Such batches of prompts an optimizer step. Above 1, prompts are captured again for the gradient, "
        "so that only one batch of states is held.",
    )

    # Sampling
    num_generations: int = Field(default=8, description="Responses to each prompt: its group.")
    max_completion_length: Positive = Field(default=512, description="Most tokens of a response.")
    temperature: float = Field(
        default=1.0, gt=0, description="Divides the logits, for sampling and for every log-probability."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; 1.0 is off.")
    top_k: int = Field(default=0, ge=0, description="Sample among the k likeliest tokens; 0 is off.")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Least probability, relative to the likeliest token's."
    )
    repetition_penalty: float = Field(default=1.0, gt=0, description="Above 1.0 discourages tokens already present.")
    stop_token_ids: list[int] = Field(
        default_factory=list, description="Further ids that end a response, beside the model's eos."
    )

    skip_special_tokens: bool = Field(
        default=True,
        description="Leave special tokens out of the completions that rewards and logs get as text; false keeps tags "
        "that the tokenizer has as special tokens, and the end-of-sequence token.",
    )
    rollout_func: str | None = Field(
        default=None,
        description="'module:function' that makes the responses itself (tools, environments); its module's text is in "
        "longstraw.rollout.function_sampler. Default: sample from the captured prompt.",
    )

    # Objective
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = Field(default="dapo", description="Policy loss.")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Ratio per token, or per sequence (GSPO)."
    )
    epsilon: float = Field(default=0.2, ge=0, description="Clipping range below 1.")
    epsilon_high: float | None = Field(default=None, ge=0, description="Clipping range above 1; default: epsilon.")
    delta: float | None = Field(
        default=None, gt=0, description="Upper bound of the ratio on the unclipped side (two-sided clipping)."
    )
    beta: float = Field(default=0.0, ge=0, description="Weight of the KL term; 0 keeps no reference policy.")
    use_bias_correction_kl: bool = Field(
        default=True, description="Multiply the KL term by the ratio (unbiased gradient)."
    )
    top_entropy_quantile: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the step's tokens, those of highest entropy, whose policy term counts. Below 1 the "
        "responses are scored once more.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="Divide advantages by the standard deviation of the group, of the batch, or not."
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Leave responses cut at the length limit out of the loss."
    )
    num_iterations: Positive = Field(default=1, description="Optimizer steps on the same responses.")
    refresh: RefreshConfig = Field(
        default_factory=RefreshConfig,
        description="With num_iterations above 1, when a prompt is captured again: always (after every optimizer "
        "step), {every: N} or {drift: TOLERANCE}; in between its state is kept and stale.",
    )
    dynamic_sampling: bool = Field(
        default=False, description="Replace groups whose rewards do not differ by further prompts (DAPO)."
    )
    max_resampling_rounds: Positive = Field(
        default=4, description="Rounds of replacement a step at most, with dynamic_sampling."
    )

    # Optimizer
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Scheduler = Field(default="linear", description="Schedule, from transformers.")
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the schedule.")
    warmup_steps: float = Field(
        default=0, ge=0, description="Steps of linear warm-up; below 1: the share of all steps."
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decay of matrices; vectors (norms, biases) are left out."
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's first moment.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's second moment.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Clip the gradient's norm; 0 is off.")
    max_steps: int = Field(default=-1, ge=-1, description="Optimizer steps; -1: as num_train_epochs says.")
    num_train_epochs: float = Field(default=3.0, gt=0, description="Passes over the prompts, when max_steps is -1.")

    # The engine
    prompt_grad: Literal["full", "none"] | Positive = Field(
        default="full", description="Gradient through the whole prompt, none of it, or its last N tokens."
    )
    segment_tokens: Positive = Field(
        default=4096, description="Tokens of a segment: the prompt runs, and is pulled back, in such pieces."
    )
    block_tokens: Positive = Field(
        default=1024, description="Tokens of a block: responses run in such pieces; short ones share one."
    )
    tier: Literal["device", "host", "disk"] = Field(default="device", description="Where the prompt's pages rest.")
    tier_bytes: dict[str, Bytes] = Field(
        default_factory=dict,
        description="Bounds by tier, e.g. {device: 8GiB}; pages beyond rest on the next tier down.",
    )
    page_dir: str | None = Field(
        default=None, description="Folder of the disk tier; default: the system's temporary one."
    )
    retain_graph_bytes: Bytes = Field(
        default=0,
        description="Memory a prompt may use for graphs and scored responses that then need no recomputation; results "
        "are the same.",
    )
    recompute_layers: bool = Field(
        default=False, description="Hold one layer's activations at a time; less memory, one more recomputation."
    )
    boundary_bytes: Bytes | None = Field(
        default=None,
        description="Bound on carried states (recurrent, convolution, window) kept at segment boundaries, the others "
        "being recomputed; null is no bound.",
    )

    # Running, saving, reporting
    seed: int = Field(default=42, ge=0, description="Seed of everything random.")
    logging_steps: Positive = Field(
        default=1, description="Print a line every so many steps; metrics.jsonl has every step."
    )
    report_to: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=list,
        description="Where metrics go besides metrics.jsonl: tensorboard (into the run directory), wandb; one or both.",
    )
    log_completions: bool = Field(default=True, description="Keep prompts' ends, completions and rewards as JSONL.")
    log_gradient_parts: bool = Field(
        default=False,
        description="Log the norms of the gradient's response side and prompt side, and their cosine; holds up to two "
        "more copies of the gradient, one of them in float32 at least.",
    )
    eval_steps: Positive | None = Field(default=None, description="Evaluate every so many steps too.")
    eval_on_start: bool = Field(default=True, description="Evaluate before the first step.")
    save_steps: Positive = Field(default=500, description="Write a checkpoint every so many steps.")
    save_total_limit: Positive | None = Field(
        default=2, description="Keep the newest so many checkpoints; null keeps all."
    )

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _one_reward_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_destination_is_a_list(cls, value: Any) -> Any:
        return ([] if value == "none" else [value]) if isinstance(value, str) else value

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _trl_booleans(cls, value: Any) -> Any:
        return {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_combinations(self) -> TrainConfig:
        problems = list(find_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def policy_loss(self) -> PolicyLoss:
        """The loss that these options describe. Raises ValueError for a combination that cannot be."""
        return PolicyLoss(**{option.name: getattr(self, option.name) for option in fields(PolicyLoss)})

    @property
    def prompts_per_update(self) -> int:
        """Prompts an optimizer step: `prompts_per_step` times `gradient_accumulation_steps`."""
        return self.prompts_per_step * self.gradient_accumulation_steps

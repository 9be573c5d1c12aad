"""TRL's GRPOTrainer on given completions: its own training step, without generation, optimizer or logging."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from benchmarks.memory import Watcher
from benchmarks.workload import CLIP, Group


def trl(model: Any) -> Any:
    """Micro-batches of one response, gradient checkpointing, on the CPU.

    Raises:
        ModuleNotFoundError: TRL is not installed.
    """
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    class GivenCompletions(GRPOTrainer):
        """The trainer with its rollouts replaced by a group that is there already."""

        given: dict[str, torch.Tensor]

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return dict(self.given)

    folder = tempfile.TemporaryDirectory(prefix="longstraw-benchmark-")
    vocab_size = model.config.vocab_size

    def trainer_for(group: Group) -> GRPOTrainer:
        num = len(group.responses)
        arguments = GRPOConfig(
            output_dir=folder.name,
            use_cpu=True,
            bf16=False,
            use_vllm=False,
            report_to=[],
            per_device_train_batch_size=1,
            gradient_accumulation_steps=num,
            num_generations=num,
            max_completion_length=max(r.numel() for r in group.responses),
            loss_type="dapo",
            epsilon=CLIP,
            beta=0.0,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
        trainer = GivenCompletions(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["t0"] * num}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=_tokenizer(vocab_size), eos_token="t1", pad_token="t0"
            ),
        )
        trainer.current_gradient_accumulation_steps = num
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return trainer

    # The trainer patches the model's head when it is built, so one serves the whole process; only its counts change.
    trainers: list[GRPOTrainer] = []

    def step(group: Group, watcher: Watcher) -> None:
        if not trainers:
            trainers.append(trainer_for(group))
        trainer = trainers[0]
        num = len(group.responses)
        trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation = num
        trainer.current_gradient_accumulation_steps = num
        trainer._step, trainer._buffered_inputs = 0, None
        trainer.given = _batch(group)
        watcher.enter("step")
        for _ in range(num):
            trainer.training_step(model, [], group.num_tokens)

    return step


def _batch(group: Group) -> dict[str, torch.Tensor]:
    completions = torch.stack(group.responses)
    prompts = group.prompt.expand(len(completions), -1)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": group.advantages,
        "old_per_token_logps": torch.stack(group.old_logps),
        "num_items_in_batch": torch.tensor(group.num_tokens),
    }


def _tokenizer(vocab_size: int) -> Any:
    """The trainer asks for a tokenizer; nothing is tokenized."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))

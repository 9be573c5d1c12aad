"""Equality with TRL's own loss: its trainer's method runs on a bare object over the same completions, padded."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from longstraw.objective import Normalizer, PolicyLoss, combine_rewards, group_advantages

pytest.importorskip("trl")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

MAX_COMPLETION_LENGTH = 16
LENGTHS = (9, 1, 16, 5, 12, 3, 16, 7)
PAD_LOGP = -3.0


def completions(seed=0):
    """Padded [B, T] log-probabilities (policy, old, reference), a mask of scored tokens, advantages; float32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    logps = -2 + 0.5 * torch.randn(shape, generator=generator)
    old = logps - 0.3 * torch.randn(shape, generator=generator)
    reference = logps - 0.3 * torch.randn(shape, generator=generator)
    completion = torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]
    scored = completion & (torch.rand(shape, generator=generator) > 0.2)
    scored[5] = False  # a truncated completion, masked out as a whole
    padded = [torch.where(completion, values, PAD_LOGP) for values in (logps, old, reference)]
    return *padded, scored, torch.randn(shape[0], generator=generator)


def trl_step(options, logps, old, reference, mask, advantages, num_micro_batches):
    """Loss and gradient of one optimizer step by TRL, and its metrics, over equal micro-batches."""
    trainer = SimpleNamespace(
        loss_type=options.loss_type,
        importance_sampling_level=options.importance_sampling_level,
        epsilon_low=options.epsilon,
        epsilon_high=options.clip_high,
        beta=options.beta,
        max_completion_length=options.max_completion_length,
        args=SimpleNamespace(
            delta=options.delta,
            use_bias_correction_kl=options.use_bias_correction_kl,
            steps_per_generation=num_micro_batches,
        ),
        current_gradient_accumulation_steps=num_micro_batches,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda values: values, reduce=lambda values, reduction: values
        ),
    )
    leaf = logps.clone().requires_grad_()
    losses = []
    for rows in torch.arange(len(logps)).chunk(num_micro_batches):
        trainer._get_per_token_logps_and_entropies = lambda *_, rows=rows, **__: (
            leaf[rows],
            torch.zeros_like(logps[rows]),
            None,
        )
        inputs = {
            "prompt_ids": torch.zeros(len(rows), 2, dtype=torch.long),
            "prompt_mask": torch.ones(len(rows), 2, dtype=torch.long),
            "completion_ids": torch.zeros(len(rows), logps.shape[1], dtype=torch.long),
            "completion_mask": mask[rows].long(),
            "advantages": advantages[rows],
            "old_per_token_logps": old[rows],
            "ref_per_token_logps": reference[rows],
            "num_items_in_batch": mask.sum(),
        }
        losses.append(grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs))
    loss = sum(losses)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], trainer._metrics["train"]


@pytest.mark.filterwarnings("ignore:importance_sampling_level='sequence'", "ignore:loss_type='cispo'")
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epsilon": 0.05, "epsilon_high": 0.28, "beta": 0.04},
        {"epsilon": 0.1, "delta": 1.4, "beta": 0.04, "use_bias_correction_kl": False},
    ],
)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_loss_gradient_and_metrics_equal_trl(loss_type, level, options, num_micro_batches):
    if loss_type == "bnpo" and num_micro_batches > 1:
        pytest.skip("TRL normalises bnpo by the micro-batch, so that its step depends on the cut")
    if loss_type == "cispo":
        options = {name: value for name, value in options.items() if name != "delta"}
    loss_of = PolicyLoss(
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=MAX_COMPLETION_LENGTH,
        **options,
    )
    logps, old, reference, mask, advantages = completions()
    expected, expected_gradient, trl_metrics = trl_step(
        loss_of, logps, old, reference, mask, advantages, num_micro_batches
    )

    def unpad(padded):
        return [row[:length] for row, length in zip(padded, LENGTHS)]

    leaf = logps.clone().requires_grad_()
    masks = unpad(mask)
    loss, metrics = loss_of(
        unpad(leaf),
        advantages,
        Normalizer.from_masks(masks),
        old_logps=unpad(old),
        masks=masks,
        ref_logps=unpad(reference) if loss_of.beta else None,
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(loss.detach(), expected, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=2e-6, atol=1e-8)
    torch.testing.assert_close(gradient.norm(), expected_gradient.norm(), rtol=1e-6, atol=0)

    # At sequence level TRL's means count a completion without scored tokens, here they do not.
    if num_micro_batches == 1 and level == "token":
        names = metrics.keys() - {"ratio/mean", "approx_kl"}
        assert names
        for name in names:
            assert float(metrics[name]) == pytest.approx(trl_metrics[name][0], rel=1e-5, abs=1e-7), name


def test_defaults_equal_trl():
    defaults = {name: field.default for name, field in grpo_trainer.GRPOConfig.__dataclass_fields__.items()}
    for name, field in PolicyLoss.__dataclass_fields__.items():
        assert field.default == defaults[name], name


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl_statistics(scale):
    """TRL keeps this computation inside its rollout; its steps are repeated here on its own nan-aware deviation."""
    nanstd = grpo_trainer.nanstd
    nan = float("nan")
    rewards_per_func = torch.tensor([[1.0, 0.5], [0.0, nan], [nan, nan], [0.3, 0.1], [nan, 2.0], [1.0, 1.0]])
    weights = torch.tensor([1.0, 0.25])
    rewards = (rewards_per_func * weights).nansum(dim=1)
    rewards[rewards_per_func.isnan().all(dim=1)] = nan
    groups = rewards.view(2, 3)
    expected = groups - groups.nanmean(dim=1, keepdim=True)
    if scale == "group":
        expected = expected / (nanstd(groups, dim=1, keepdim=True) + 1e-4)
    elif scale == "batch":
        expected = expected / (nanstd(rewards) + 1e-4)
    ours = group_advantages(combine_rewards(rewards_per_func, weights.tolist()), 3, scale)
    torch.testing.assert_close(ours.float(), expected.nan_to_num(nan=0.0), rtol=1e-5, atol=1e-6)

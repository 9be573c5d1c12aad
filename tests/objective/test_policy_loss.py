import math
import subprocess
import sys
import warnings

import pytest
import torch

from longstraw.objective import Mean, Normalizer, PolicyLoss, merge_metrics

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
ADVANTAGES = [1.3, -0.7, 0.0, -1.9, 0.4, 0.9]


def quiet_loss(**options):
    """A PolicyLoss whose options may be ones that it warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PolicyLoss(**options)


def ragged(lengths=(5, 3, 4, 7, 0, 1), seed=0, dtype=torch.float64):
    """Leaves, old and reference log-probabilities, and masks; the second response has no scored token."""
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(4, length, generator=generator, dtype=torch.float64) for length in lengths]
    logps = [(-2 + 0.5 * row[0]).to(dtype).requires_grad_() for row in noise]
    old = [(leaf.detach() - 0.4 * row[1]).to(dtype) for leaf, row in zip(logps, noise)]
    reference = [(leaf.detach() - 0.4 * row[2]).to(dtype) for leaf, row in zip(logps, noise)]
    masks = [row[3] > -0.5 for row in noise]
    masks[1][:] = False
    return logps, old, reference, masks


def loop_reference(loss, logps, old_logps, advantages, masks, ref_logps, normalizer):
    """The loss and its gradient token by token, on plain floats, with derivatives taken by hand."""
    total, gradients = 0.0, [[0.0] * len(row) for row in logps]
    high = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
    for i, advantage in enumerate(advantages):
        scored = [t for t in range(len(logps[i])) if masks[i][t]]
        if not scored:
            continue
        denominator = {
            "grpo": len(scored) * normalizer.num_responses,
            "dr_grpo": (loss.max_completion_length or 0) * normalizer.num_responses,
        }.get(loss.loss_type, normalizer.num_tokens)
        log_ratios = {t: logps[i][t] - old_logps[i][t] for t in scored}
        mean_ratio = math.exp(sum(log_ratios.values()) / len(scored))
        for t in scored:
            at_sequence = loss.importance_sampling_level == "sequence"
            ratio = mean_ratio if at_sequence else math.exp(log_ratios[t])
            if loss.loss_type == "cispo":
                value = -min(ratio, high) * advantage * logps[i][t]
                by_logp, by_ratio = -min(ratio, high) * advantage, 0.0
            else:
                bounded = ratio if loss.delta is None else min(ratio, loss.delta)
                clipped = min(max(ratio, 1 - loss.epsilon), 1 + high)
                value = -min(bounded * advantage, clipped * advantage)
                ratio_decides = bounded * advantage <= clipped * advantage and bounded == ratio
                by_logp, by_ratio = 0.0, -advantage if ratio_decides else 0.0
            if loss.beta:
                difference = ref_logps[i][t] - logps[i][t]
                k3 = math.exp(difference) - difference - 1
                weight = ratio if loss.use_bias_correction_kl else 1.0
                value += loss.beta * weight * k3
                by_logp += loss.beta * weight * (1 - math.exp(difference))
                by_ratio += loss.beta * k3 if loss.use_bias_correction_kl else 0.0
            total += value / denominator
            gradients[i][t] += by_logp / denominator
            for other in scored if at_sequence else [t]:
                gradients[i][other] += by_ratio * ratio / (len(scored) if at_sequence else 1) / denominator
    return total, gradients


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.28},
        {"epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.3},
        {"beta": 0.3},
        {"beta": 0.3, "use_bias_correction_kl": False, "max_completion_length": 11},
    ],
)
def test_loss_and_gradient_match_a_plain_loop(loss_type, level, options):
    if loss_type == "cispo" and "delta" in options:
        options = {"epsilon_high": 1.1}
    loss = quiet_loss(loss_type=loss_type, importance_sampling_level=level, **options)
    logps, old, reference, masks = ragged()
    normalizer = Normalizer(9, 31)  # a step with more than this group
    ref_logps = reference if loss.beta else None
    value, _ = loss(logps, ADVANTAGES, normalizer, old_logps=old, masks=masks, ref_logps=ref_logps)
    gradients = torch.autograd.grad(value, logps)

    plain = [[row.tolist() for row in rows] for rows in (logps, old, masks, reference)]
    expected, expected_gradients = loop_reference(loss, plain[0], plain[1], ADVANTAGES, plain[2], plain[3], normalizer)
    assert value.dtype == torch.float64 and value.dim() == 0
    assert value.item() == pytest.approx(expected, rel=1e-12)
    for index, (gradient, by_hand) in enumerate(zip(gradients, expected_gradients)):
        by_hand = torch.tensor(by_hand, dtype=torch.float64)
        torch.testing.assert_close(gradient, by_hand, rtol=1e-12, atol=1e-15, msg=lambda m, i=index: f"logps[{i}]: {m}")


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "value", "slope"),
    [
        (2.0, 1.0, {}, -1.2, 0.0),  # clipped above
        (2.0, -1.0, {}, 2.0, 2.0),  # a bad token made likelier is never clipped
        (2.0, -1.0, {"delta": 1.5}, 1.5, 0.0),  # unless delta bounds it
        (0.5, -1.0, {}, 0.8, 0.0),  # clipped below
        (0.5, 1.0, {}, -0.5, -0.5),
        (1.25, 1.0, {"epsilon_high": 0.28}, -1.25, -1.25),
        (1.1, 2.0, {}, -2.2, -2.2),
        (2.0, 1.0, {"loss_type": "cispo", "epsilon_high": 1.5}, 4.5, -1.5),  # log π = −3
        (0.5, -2.0, {"loss_type": "cispo", "epsilon_high": 1.5}, -3.0, 1.0),
    ],
)
def test_one_token_by_hand(ratio, advantage, options, value, slope):
    logps = [torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)]
    old = [logps[0].detach() - math.log(ratio)]
    loss, _ = PolicyLoss(**options)(logps, [advantage], Normalizer(1, 1), old_logps=old)
    assert loss.item() == pytest.approx(value)
    assert torch.autograd.grad(loss, logps)[0].item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        ("grpo", (1 / 2 / 3, 1 / 2)),
        ("dr_grpo", (1 / 2 / 10, 1 / 2 / 10)),
        ("dapo", (1 / 4, 1 / 4)),
        ("bnpo", (1 / 4, 1 / 4)),
    ],
)
def test_reductions_by_hand(loss_type, weights):
    """On policy every token's slope is −A times its weight: responses of 3 tokens and 1 token."""
    logps = [torch.full((length,), -1.0, requires_grad=True) for length in (3, 1)]
    loss = PolicyLoss(loss_type=loss_type, max_completion_length=10)
    value, _ = loss(logps, [1.0, -2.0], Normalizer.from_lengths([3, 1]))
    assert value.item() == pytest.approx(-1.0 * 3 * weights[0] + 2.0 * weights[1])
    first, second = torch.autograd.grad(value, logps)
    torch.testing.assert_close(first, torch.full((3,), -weights[0]))
    torch.testing.assert_close(second, torch.full((1,), 2 * weights[1]))


def test_sequence_ratio_is_the_geometric_mean_of_the_scored_tokens():
    logps = [torch.tensor([-1.0, -5.0, -1.0], dtype=torch.float64, requires_grad=True)]
    old = [torch.tensor([-1.1, -1.0, -1.2], dtype=torch.float64)]
    masks = [torch.tensor([True, False, True])]
    loss = PolicyLoss(loss_type="grpo", importance_sampling_level="sequence")
    value, metrics = loss(logps, [-1.0], Normalizer.from_masks(masks), old_logps=old, masks=masks)
    ratio = math.exp((0.1 + 0.2) / 2)
    assert value.item() == pytest.approx(ratio)
    assert float(metrics["ratio/mean"]) == pytest.approx(ratio)
    gradient = torch.autograd.grad(value, logps)[0]
    torch.testing.assert_close(gradient, torch.tensor([ratio / 2, 0.0, ratio / 2], dtype=torch.float64))


def test_cispo_gradient_goes_through_the_log_probability_alone():
    logps, old, _, masks = ragged()
    loss = PolicyLoss(loss_type="cispo", epsilon_high=1.2)
    value, _ = loss(logps, ADVANTAGES, Normalizer(6, 17), old_logps=old, masks=masks)
    for leaf, old_logp, advantage, mask, gradient in zip(
        logps, old, ADVANTAGES, masks, torch.autograd.grad(value, logps)
    ):
        expected = -(leaf.detach() - old_logp).exp().clamp(max=1.2) * advantage / 17 * mask
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5), (2,), (3, 5)])
def test_any_cut_of_the_step_gives_the_same_loss_gradient_and_metrics(loss_type, cuts):
    loss = quiet_loss(loss_type=loss_type, beta=0.1, epsilon=0.1)
    logps, old, reference, masks = ragged()
    pieces = [slice(start, stop) for start, stop in zip((0, *cuts), (*cuts, len(logps)))]
    normalizer = Normalizer.sum_of(Normalizer.from_masks(masks[piece]) for piece in pieces)
    assert normalizer == Normalizer.from_masks(masks)

    def share(piece):
        return loss(
            logps[piece],
            torch.tensor(ADVANTAGES, dtype=torch.float64)[piece],
            normalizer,
            old_logps=old[piece],
            masks=masks[piece],
            ref_logps=reference[piece],
        )

    whole, whole_metrics = share(slice(None))
    shares = [share(piece) for piece in pieces]
    torch.testing.assert_close(sum(value for value, _ in shares), whole, rtol=1e-14, atol=1e-15)
    for part, full in zip(
        torch.autograd.grad(sum(value for value, _ in shares), logps), torch.autograd.grad(whole, logps)
    ):
        assert part.equal(full)
    merged = merge_metrics(metrics for _, metrics in shares)
    assert merged.keys() == whole_metrics.keys()
    for name, mean in merged.items():
        assert float(mean) == pytest.approx(float(whole_metrics[name]), rel=1e-12), name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_scored_is_a_finite_zero_with_a_graph(loss_type, level):
    loss = quiet_loss(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    logps, old, reference, masks = ragged()
    masks = [torch.zeros_like(mask) for mask in masks]
    normalizer = Normalizer.from_masks(masks)
    value, metrics = loss(logps, ADVANTAGES, normalizer, old_logps=old, masks=masks, ref_logps=reference)
    assert value.item() == 0
    for leaf, gradient in zip(logps, torch.autograd.grad(value, logps)):
        assert gradient.equal(torch.zeros_like(leaf))
    assert all(float(mean) == 0 for mean in metrics.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_empty_response_changes_nothing_for_the_others(level):
    loss = quiet_loss(importance_sampling_level=level)
    logps, old, _, _ = ragged(lengths=(4, 2))
    normalizer = Normalizer(3, 6)
    alone, alone_metrics = loss(logps, [1.0, -1.0], normalizer, old_logps=old)
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    value, metrics = loss([logps[0], empty, logps[1]], [1.0, 3.0, -1.0], normalizer, old_logps=[old[0], empty, old[1]])
    assert value.equal(alone)
    assert {name: float(mean) for name, mean in metrics.items()} == {
        name: float(mean) for name, mean in alone_metrics.items()
    }
    assert torch.autograd.grad(value, empty)[0].shape == (0,)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_old_log_probabilities_the_policy_is_its_own(loss_type):
    loss = quiet_loss(loss_type=loss_type)
    logps, _, _, masks = ragged()
    normalizer = Normalizer.from_masks(masks)
    implicit, metrics = loss(logps, ADVANTAGES, normalizer, masks=masks)
    explicit, _ = loss(logps, ADVANTAGES, normalizer, masks=masks, old_logps=[row.detach() for row in logps])
    assert implicit.equal(explicit)
    gradients = zip(torch.autograd.grad(implicit, logps), torch.autograd.grad(explicit, logps))
    assert all(ours.equal(theirs) for ours, theirs in gradients)
    assert float(metrics["ratio/mean"]) == 1 and float(metrics["approx_kl"]) == 0


def test_an_unscored_token_cannot_poison_loss_or_gradient():
    logps = [torch.tensor([-1.0, -math.inf, -2.0], requires_grad=True)]
    old = [torch.tensor([-1.1, -math.inf, -2.2])]
    masks = [torch.tensor([True, False, True])]
    loss = PolicyLoss(beta=0.1)
    value, metrics = loss(logps, [1.0], Normalizer(1, 2), old_logps=old, masks=masks, ref_logps=old)
    gradient = torch.autograd.grad(value, logps)[0]
    assert value.isfinite() and gradient.isfinite().all() and gradient[1] == 0
    assert all(math.isfinite(float(mean)) for mean in metrics.values())


@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_clipped_ratio_beyond_the_float_range_has_zero_gradient(advantage, level):
    logps = [torch.tensor([-1.0], requires_grad=True)]
    loss = PolicyLoss(loss_type="grpo", importance_sampling_level=level)
    value, _ = loss(logps, [advantage], Normalizer(1, 1), old_logps=[torch.tensor([-500.0])])
    assert value.item() == pytest.approx(-1.2 * advantage)
    assert torch.autograd.grad(value, logps)[0].item() == 0


def test_kl_is_exactly_zero_where_policy_and_reference_coincide():
    logps, old, _, _ = ragged(dtype=torch.float32)
    reference = [row.detach() for row in logps]
    with_kl, metrics = PolicyLoss(beta=0.5)(logps, ADVANTAGES, Normalizer(6, 20), old_logps=old, ref_logps=reference)
    without, _ = PolicyLoss()(logps, ADVANTAGES, Normalizer(6, 20), old_logps=old)
    assert float(metrics["kl"]) == 0
    assert with_kl.equal(without)


def test_reference_without_beta_is_measured_only():
    logps, old, reference, _ = ragged()
    loss, metrics = PolicyLoss()(logps, ADVANTAGES, Normalizer(6, 20), old_logps=old, ref_logps=reference)
    assert float(metrics["kl"]) > 0
    assert loss.equal(PolicyLoss()(logps, ADVANTAGES, Normalizer(6, 20), old_logps=old)[0])


def test_metrics_by_hand():
    ratios = [[1.5, 1.0, 0.5], [1.5, 0.5, 0.7, 1.0]]
    logps = [torch.full((len(row),), -1.0, dtype=torch.float64, requires_grad=True) for row in ratios]
    old = [-1.0 - torch.tensor(row, dtype=torch.float64).log() for row in ratios]
    _, metrics = PolicyLoss()(logps, [1.0, -1.0], Normalizer(2, 7), old_logps=old)
    values = {name: float(mean) for name, mean in metrics.items()}
    flat = ratios[0] + ratios[1]
    assert values == pytest.approx(
        {
            "clip_ratio/low_mean": 2 / 7,
            "clip_ratio/high_mean": 1 / 7,
            "clip_ratio/region_mean": 3 / 7,
            "ratio/mean": sum(flat) / 7,
            "approx_kl": sum(ratio - 1 - math.log(ratio) for ratio in flat) / 7,
        }
    )
    assert not any(mean.total.requires_grad for mean in metrics.values())
    _, metrics = PolicyLoss(loss_type="cispo", epsilon_high=1.2)(logps, [1.0, -1.0], Normalizer(2, 7), old_logps=old)
    assert float(metrics["cispo_clip_ratio"]) == pytest.approx(1 / 7)


def test_means_merge_by_count():
    assert float(Mean(6.0, 2) + Mean(0.0, 4)) == 1.0
    assert float(Mean()) == 0.0
    merged = merge_metrics([{"a": Mean(1.0, 1)}, {"a": Mean(2.0, 2), "b": Mean(5.0, 1)}])
    assert merged == {"a": Mean(3.0, 3), "b": Mean(5.0, 1)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of 'grpo'"),
        ({"importance_sampling_level": "tokens"}, "importance_sampling_level must be one of"),
        ({"epsilon": -0.1}, "epsilon must be"),
        ({"epsilon": math.nan}, "epsilon must be"),
        ({"epsilon_high": -1.0}, "epsilon_high must be"),
        ({"delta": 0.0}, "delta must be"),
        ({"beta": -1.0}, "beta must be"),
        ({"max_completion_length": 0}, "max_completion_length must be"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "divides by max_completion_length"),
        ({"loss_type": "cispo", "delta": 2.0}, "delta=2.0 has no effect"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, r"epsilon_high=5\.0"),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "loss_type='grpo'"),
        ({"delta": 1.1}, "replaces that bound"),
    ],
)
def test_likely_mistakes_are_warned_about(options, message):
    with pytest.warns(UserWarning, match=message):
        PolicyLoss(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logps": []}, "at least one response"),
        ({"logps": [torch.zeros(1, 2), torch.zeros(2)]}, r"logps\[0\] must be a 1-D"),
        ({"advantages": [1.0]}, "advantages has 1 entries for 2"),
        ({"advantages": [1.0, math.nan]}, "advantage of response 1 is nan"),
        ({"normalizer": Normalizer(1, 4)}, "counts 1 responses"),
        ({"old_logps": [torch.zeros(2)]}, "old_logps has 1 entries"),
        ({"old_logps": [torch.zeros(2), torch.zeros(3)]}, r"old_logps\[1\] has shape \[3\]"),
        ({"masks": [torch.ones(2), torch.ones(2)]}, r"masks\[0\] must be bool"),
        ({"masks": [torch.ones(2, dtype=torch.long)] * 2}, r"masks\[0\] must be bool"),
    ],
)
def test_inputs_that_do_not_match_are_refused(changes, message):
    inputs = {"logps": [torch.zeros(2), torch.zeros(2)], "advantages": [1.0, -1.0], "normalizer": Normalizer(2, 4)}
    inputs |= changes
    if not inputs["logps"]:
        inputs["advantages"] = []
    with pytest.raises(ValueError, match=message):
        PolicyLoss()(**inputs)


def test_beta_without_a_reference_is_refused():
    with pytest.raises(ValueError, match=r"beta=0\.1 needs ref_logps"):
        PolicyLoss(beta=0.1)([torch.zeros(2)], [1.0], Normalizer(1, 2))


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="cannot be negative"):
        Normalizer(-1, 3)


def test_options_need_no_torch():
    script = (
        "import sys; from longstraw.objective import Normalizer, PolicyLoss; "
        "PolicyLoss(loss_type='grpo'); Normalizer.from_lengths([1, 2]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

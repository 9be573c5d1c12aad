import math

import torch

from longstraw.objective import per_token_kl


def categorical(seed, num_tokens=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, generator=generator, dtype=torch.float64).requires_grad_()


def exact_kl(p_logps, q_logps):
    return (p_logps.exp() * (p_logps - q_logps)).sum()


def test_by_hand():
    logps = torch.tensor([math.log(0.5), math.log(0.2)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.25), math.log(0.4)], dtype=torch.float64)
    expected = torch.tensor([0.5 + math.log(2) - 1, 2 - math.log(2) - 1], dtype=torch.float64)
    torch.testing.assert_close(per_token_kl(logps, reference), expected)
    ratio = torch.tensor([2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(per_token_kl(logps, reference, ratio), expected * ratio)


def test_exactly_zero_with_zero_gradient_where_policy_and_reference_coincide():
    for dtype in (torch.float32, torch.float64):
        logps = (-10 * torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=dtype)).requires_grad_()
        old = logps.detach() - 0.3
        for ratio in (None, (logps - old).exp()):
            kl = per_token_kl(logps, logps.detach(), ratio)
            assert (kl == 0).all()
            (gradient,) = torch.autograd.grad(kl.sum(), logps)
            assert (gradient == 0).all()


def test_small_differences_keep_their_digits():
    difference = 1e-6
    kl = per_token_kl(torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.0 + difference], dtype=torch.float64))
    series = difference**2 / 2 + difference**3 / 6
    torch.testing.assert_close(kl.item(), series, rtol=1e-6, atol=0)


def test_expectation_over_all_tokens_is_the_kl():
    policy, reference = categorical(1).log_softmax(0), categorical(2).log_softmax(0)
    expectation = (policy.exp().detach() * per_token_kl(policy, reference)).sum()
    torch.testing.assert_close(expectation, exact_kl(policy, reference))


def test_corrected_estimate_is_unbiased_in_value_and_gradient_off_policy():
    logits, reference, old = (
        categorical(1),
        categorical(2).log_softmax(0).detach(),
        categorical(3).log_softmax(0).detach(),
    )
    policy = logits.log_softmax(0)
    estimate = (old.exp() * per_token_kl(policy, reference, (policy - old).exp())).sum()
    exact = exact_kl(policy, reference)
    torch.testing.assert_close(estimate, exact)
    (estimated_gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (exact_gradient,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(estimated_gradient, exact_gradient)


def test_plain_k3_gradient_descends_the_other_direction_of_the_kl():
    logits, reference = categorical(1), categorical(2).log_softmax(0).detach()
    policy = logits.log_softmax(0)
    estimate = (policy.exp().detach() * per_token_kl(policy, reference)).sum()
    (estimated_gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad(exact_kl(reference, policy), logits)
    torch.testing.assert_close(estimated_gradient, forward_gradient)

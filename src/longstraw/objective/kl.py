"""The KL divergence from the policy to a reference, estimated on the sampled tokens. Free of torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def per_token_kl(logps: Tensor, ref_logps: Tensor, ratio: Tensor | None = None) -> Tensor:
    r"""Schulman's k3 estimator of KL(π ‖ π_ref), one non-negative value a token, exactly 0 where the two coincide.

    With d = log π_ref(y_t) − log π(y_t):

        k3_t = exp(d) − d − 1

    For tokens drawn from π its expectation is KL(π ‖ π_ref) (J. Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html). Its *gradient* is not that KL's: a token's weight on ∇log π is 1 − exp(d),
    unbounded where π ≪ π_ref, and in expectation it descends KL(π_ref ‖ π) instead.

    With `ratio` = π / π_old the estimate is importance-weighted,

        kl_t = (π / π_old) · k3_t,

    which holds for tokens drawn from π_old and makes value and gradient unbiased for KL(π ‖ π_ref): on policy the
    weight on ∇log π becomes −d = log(π / π_ref) (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, equation 7; TRL's
    `use_bias_correction_kl`). The ratio has to carry its graph for that.

    Args:
        logps: [R] log-probabilities under the policy, with graph.
        ref_logps: [R] log-probabilities of the same tokens under the reference, same dtype, without graph.
        ratio: [R], or 0-d when one ratio serves the sequence; None for plain k3.

    Returns:
        [R], in nats, with the graph of `logps` (and of `ratio`).
    """
    log_ratio = ref_logps - logps
    # expm1 keeps the digits that exp(d) − 1 loses for small d, which is where a policy stays near its reference.
    kl = log_ratio.expm1() - log_ratio
    return kl if ratio is None else kl * ratio

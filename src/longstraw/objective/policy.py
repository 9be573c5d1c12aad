"""The policy losses over a group of ragged responses. Constructing one needs no torch: configuration may import it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from longstraw.objective.kl import per_token_kl
from longstraw.objective.reduction import Mean, Normalizer

if TYPE_CHECKING:
    from torch import Tensor

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
ImportanceSamplingLevel = Literal["token", "sequence"]

# exp(80) is finite in float32. Beyond it the zero gradient of a clipped token would come out as 0 · inf = NaN.
MAX_LOG_RATIO = 80.0


@dataclass(frozen=True)
class PolicyLoss:
    r"""A policy loss with its options; names, defaults and meaning are those of TRL's GRPOConfig.

    Write ρ_t = π(y_t) / π_old(y_t), A for the response's advantage, i for responses and t for their *scored* tokens,
    N for the responses and T for the scored tokens of the whole optimizer step (`Normalizer`).

    Token loss, for every `loss_type` but `"cispo"` (PPO's clip, arXiv:1707.06347; separate bounds from DAPO,
    arXiv:2503.14476; the bound δ, absent by default, from INTELLECT-2, arXiv:2505.07291):

        l_t = −min( min(ρ_t, δ) · A,  clip(ρ_t, 1 − epsilon, 1 + epsilon_high) · A )

    for `"cispo"` (MiniMax-M1, arXiv:2506.13585; one upper bound as in ScaleRL, arXiv:2510.13786). sg is stop-gradient:
    the gradient goes through the log-probability alone. The bound is epsilon_high itself, not 1 + epsilon_high:

        l_t = −sg( min(ρ_t, epsilon_high) ) · A · log π(y_t)

    With `beta` > 0, l_t gains beta · kl_t (`objective.kl`; `use_bias_correction_kl` weighs it with ρ_t).

    Reduction:

        "grpo"             L = 1/N · Σ_i 1/|y_i| · Σ_t l_it     DeepSeekMath, arXiv:2402.03300, equation 3
        "dr_grpo"          L = 1/(N · max_completion_length) · Σ_i Σ_t l_it     Dr. GRPO, arXiv:2503.20783
        "dapo", "cispo"    L = 1/T · Σ_i Σ_t l_it     DAPO, arXiv:2503.14476, equation 8
        "bnpo"             as "dapo": TRL divides by the tokens of the *local* batch, which here is the whole step, so
                           that the loss does not depend on how the step is cut into groups, micro-steps or ranks

    `importance_sampling_level="sequence"` (GSPO, arXiv:2507.18071, equation 7) puts one ratio in place of every ρ_t of
    a response, the geometric mean: ρ = exp( 1/|y| · Σ_t log ρ_t ).

    TRL's other loss types (sapo, luspo, vespo) and its entropy bonus are not offered.

    Args:
        loss_type: see above.
        importance_sampling_level: `"token"` or `"sequence"`.
        epsilon: lower clip range, and the upper one where `epsilon_high` is None.
        epsilon_high: upper clip range; for `"cispo"` the cap of the ratio, for which ScaleRL recommends 5.0.
        delta: upper bound of the ratio where the advantage is negative; None for none.
        beta: coefficient of the KL term; 0 for none.
        use_bias_correction_kl: weigh the KL term with the importance ratio.
        max_completion_length: in tokens, the constant of `"dr_grpo"`.

    Raises:
        ValueError: a value out of range, or a combination in which an option would have no effect.
    """

    loss_type: LossType = "dapo"
    importance_sampling_level: ImportanceSamplingLevel = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    max_completion_length: int | None = 512

    def __post_init__(self) -> None:
        _check_choice("loss_type", self.loss_type, get_args(LossType))
        _check_choice("importance_sampling_level", self.importance_sampling_level, get_args(ImportanceSamplingLevel))
        for option in ("epsilon", "beta"):
            value = getattr(self, option)
            _check_range(option, value, 0 <= value < math.inf, "finite and at least 0")
        high, delta, length = self.epsilon_high, self.delta, self.max_completion_length
        _check_range("epsilon_high", high, high is None or high >= 0, "at least 0, or None")
        _check_range("delta", delta, delta is None or delta > 0, "above 0, or None")
        _check_range("max_completion_length", length, length is None or length > 0, "above 0, or None")
        if self.loss_type == "dr_grpo" and length is None:
            raise ValueError("loss_type='dr_grpo' divides by max_completion_length, which is None; set it to a number")
        if self.loss_type == "cispo" and delta is not None:
            raise ValueError(
                f"delta={delta} has no effect with loss_type='cispo', which caps the ratio at epsilon_high; "
                "leave delta out, or choose another loss_type"
            )
        self._warn_of_likely_mistakes()

    def _warn_of_likely_mistakes(self) -> None:
        if self.loss_type == "cispo" and self.clip_high < 1:
            warnings.warn(
                f"loss_type='cispo' caps the ratio at epsilon_high itself, here {self.clip_high}: even on-policy "
                "tokens, of ratio 1, are scaled down to it; ScaleRL recommends epsilon_high=5.0",
                stacklevel=4,
            )
        if self.importance_sampling_level == "sequence" and self.loss_type != "grpo":
            warnings.warn(
                f"importance_sampling_level='sequence' with loss_type='{self.loss_type}' weighs each response by its "
                "length; GSPO's own objective is loss_type='grpo'",
                stacklevel=4,
            )
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            warnings.warn(
                f"delta={self.delta} is not above 1 + epsilon_high = {1 + self.clip_high}, so it replaces that bound "
                "for positive advantages too",
                stacklevel=4,
            )

    @property
    def clip_high(self) -> float:
        """`epsilon_high` with its default filled in."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(
        self,
        logps: Sequence[Tensor],
        advantages: Sequence[float] | Tensor,
        normalizer: Normalizer,
        *,
        old_logps: Sequence[Tensor] | None = None,
        masks: Sequence[Tensor] | None = None,
        ref_logps: Sequence[Tensor] | None = None,
        policy_masks: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Mean]]:
        """The group's share of the step's loss, and what to log about it.

        Shares add up: the sum over any cut of the step into groups is the loss of the whole, given the step's
        `normalizer`. A response without a scored token contributes 0. The loss has a graph to every tensor of `logps`.

        Args:
            logps: one [R_i] floating tensor a response, R_i ≥ 0, under the policy, with graph.
            advantages: [num_responses], one a response.
            normalizer: counts over the whole optimizer step.
            old_logps: the same tokens under the policy that sampled them, each [R_i]; None for `logps` without graph,
                which is right for the first update after sampling.
            masks: bool [R_i] each, True where a token is scored. Tool tokens and truncated responses
                (TRL's `mask_truncated_completions`) are False. None scores every token.
            ref_logps: the same tokens under the reference, each [R_i]; needed with `beta` > 0. With `beta` = 0 they
                are measured only.
            policy_masks: bool [R_i] each, False where a scored token has no policy term: it keeps its KL term and its
                place in every count (`objective.entropy`). None gives every token its term.

        Returns:
            The loss, 0-d in the dtype of `logps`, and means by TRL's names, detached:
            `clip_ratio/low_mean`, `clip_ratio/high_mean`, `clip_ratio/region_mean`, or `cispo_clip_ratio`; `kl` where
            there is a reference; and `ratio/mean` and `approx_kl` (k3 of KL(π_old ‖ π)). Clip fractions and ratio are
            means over scored tokens, or over responses at sequence level; both KL over scored tokens.

        Raises:
            ValueError: lists or tensors that do not match, a mask that is not bool, an advantage that is not finite, no
                reference although `beta` > 0.
        """
        if self.beta > 0 and ref_logps is None:
            raise ValueError(f"beta={self.beta} needs ref_logps, the reference's log-probabilities; or set beta=0")
        _check_group(
            logps,
            advantages,
            normalizer,
            old_logps=old_logps,
            masks=masks,
            ref_logps=ref_logps,
            policy_masks=policy_masks,
        )

        shares: list[Tensor] = []
        metrics = {name: Mean() for name in self._metric_names(has_reference=ref_logps is not None)}
        for index, advantage in enumerate(map(float, advantages)):
            # Selecting, unlike multiplying by 0, keeps an unscored token's overflow out of loss and gradient.
            chosen = slice(None) if masks is None else masks[index]
            logp = logps[index][chosen]
            old_logp = logp.detach() if old_logps is None else old_logps[index].detach().to(logp)[chosen]
            log_ratio = logp - old_logp
            if self.importance_sampling_level == "sequence":
                ratio = (log_ratio.sum() / max(logp.numel(), 1)).clamp(max=MAX_LOG_RATIO).exp()  # 0-d
            else:
                ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()

            loss, clip_masks = self._policy_term(ratio, logp, advantage)
            if policy_masks is not None:
                loss = loss.expand_as(logp).where(policy_masks[index][chosen], 0)
            measured: dict[str, Tensor] = {**clip_masks, "ratio/mean": ratio}
            measured["approx_kl"] = log_ratio.expm1() - log_ratio
            if ref_logps is not None:
                ref_logp = ref_logps[index].detach().to(logp)[chosen]
                measured["kl"] = per_token_kl(logp, ref_logp, ratio if self.use_bias_correction_kl else None)
            if self.beta > 0:
                loss = loss + self.beta * measured["kl"]

            shares.append(loss.expand_as(logp).sum() / self._denominator(logp.numel(), normalizer))
            if logp.numel():
                for name, values in measured.items():
                    metrics[name] += Mean(values.detach().sum(), values.numel())
        return sum(shares[1:], start=shares[0]), metrics

    def _policy_term(self, ratio: Tensor, logp: Tensor, advantage: float) -> tuple[Tensor, dict[str, Tensor]]:
        """l_t without the KL term, [R] or 0-d as `ratio` is, and which of its ratios the clip holds."""
        if self.loss_type == "cispo":
            capped = (ratio > self.clip_high) & (advantage > 0)
            return -(ratio.clamp(max=self.clip_high).detach() * advantage * logp), {"cispo_clip_ratio": capped}
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.clip_high)
        low = (bounded < 1 - self.epsilon) & (advantage < 0)
        high = (bounded > 1 + self.clip_high) & (advantage > 0)
        clip_masks = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
        return -(bounded * advantage).minimum(clipped * advantage), clip_masks

    def _denominator(self, num_scored: int, normalizer: Normalizer) -> int:
        """What a response's summed token losses are divided by; at least 1, so that nothing scored gives 0."""
        match self.loss_type:
            case "grpo":
                return max(num_scored, 1) * normalizer.num_responses
            case "dr_grpo":
                assert self.max_completion_length is not None  # __post_init__ has refused it
                return self.max_completion_length * normalizer.num_responses
            case _:
                return max(normalizer.num_tokens, 1)

    def _metric_names(self, has_reference: bool) -> list[str]:
        clips = ["low_mean", "high_mean", "region_mean"]
        names = ["cispo_clip_ratio"] if self.loss_type == "cispo" else [f"clip_ratio/{name}" for name in clips]
        return [*names, "ratio/mean", "approx_kl", *(["kl"] if has_reference else [])]


def _check_choice(option: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_range(option: str, value: object, is_valid: bool, expectation: str) -> None:
    if not is_valid:
        raise ValueError(f"{option} must be {expectation}, got {value!r}")


def _check_group(
    logps: Sequence[Tensor],
    advantages: Sequence[float] | Tensor,
    normalizer: Normalizer,
    **others: Sequence[Tensor] | None,
) -> None:
    num_responses = len(logps)
    if num_responses == 0:
        raise ValueError("a group needs at least one response, got no log-probabilities; leave an empty group out")
    if len(advantages) != num_responses:
        raise ValueError(f"advantages has {len(advantages)} entries for {num_responses} responses; give one a response")
    if normalizer.num_responses < num_responses:
        raise ValueError(
            f"the normaliser counts {normalizer.num_responses} responses and this group alone has {num_responses}; "
            "build it from all responses of the optimizer step"
        )
    for index, advantage in enumerate(advantages):
        if not math.isfinite(advantage):
            raise ValueError(f"the advantage of response {index} is {float(advantage)}; an unscored sample's is 0")
    for index, logp in enumerate(logps):
        if logp.dim() != 1 or not logp.is_floating_point():
            raise ValueError(
                f"logps[{index}] must be a 1-D floating tensor, got {logp.dtype} of shape {list(logp.shape)}"
            )
    for name, tensors in others.items():
        if tensors is None:
            continue
        if len(tensors) != num_responses:
            raise ValueError(f"{name} has {len(tensors)} entries for {num_responses} responses; give one a response")
        for index, tensor in enumerate(tensors):
            if tensor.shape != logps[index].shape:
                raise ValueError(
                    f"{name}[{index}] has shape {list(tensor.shape)}, but response {index} has shape "
                    f"{list(logps[index].shape)}: both must speak of the same tokens"
                )
            # Integers would be taken for positions, not for a choice of tokens.
            if name in ("masks", "policy_masks") and (tensor.is_floating_point() or str(tensor.dtype) != "torch.bool"):
                raise ValueError(f"{name}[{index}] must be bool, got {tensor.dtype}; convert it with .bool()")

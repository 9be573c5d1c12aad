"""Which prompt state a group's gradient is taken on: captured afresh, or kept from an earlier iteration by a rule.

An optimizer step moves the parameters; what the prompt left behind under the old ones is stale. With several
iterations over the same responses the rule decides when to capture again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from longstraw.config.train import TrainConfig
from longstraw.data.stream import derive_seed
from longstraw.engine.engine import Engine
from longstraw.rollout.records import Group
from longstraw.state.resident import ResidentState


@dataclass
class Staleness:
    """How stale the prompt states of one optimizer step were.

    Attributes:
        steps: optimizer steps between capture and use, one entry a prompt.
        drifts: what the probe found, one entry a probe, those included that led to a fresh capture.
        num_recaptured: prompts captured again because the parameters had moved.
    """

    steps: list[int] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    num_recaptured: int = 0

    def __add__(self, other: Staleness) -> Staleness:
        return Staleness(
            self.steps + other.steps, self.drifts + other.drifts, self.num_recaptured + other.num_recaptured
        )

    def metrics(self) -> dict[str, float]:
        """`staleness/steps` and, where it was measured, `staleness/drift` as means; `staleness/recaptured`."""
        row: dict[str, float] = {"staleness/recaptured": self.num_recaptured}
        if self.steps:
            row["staleness/steps"] = sum(self.steps) / len(self.steps)
        if self.drifts:
            row["staleness/drift"] = sum(self.drifts) / len(self.drifts)
            row["staleness/drift_max"] = max(self.drifts)
        return row


@dataclass
class StateKeeper:
    """Hands out the state of a group's prompt, and keeps it for the next iteration where the rule allows.

    Attributes:
        config: `refresh`, `num_iterations` and the seed count.
        engine: captures.
    """

    config: TrainConfig
    engine: Engine

    def take(self, group: Group, iteration: int, found: Staleness) -> ResidentState:
        """The state to use in an iteration over the group's responses (0 is the first). It is the caller's now."""
        state, group.state = group.state, None
        try:
            if state is not None and iteration > group.captured_in and self._is_due(state, group, iteration, found):
                state.release()
                state = None
        except BaseException:
            assert state is not None
            state.release()
            raise
        if state is None:
            state = self.engine.capture(group.prompt_ids)
            group.captured_in = iteration
            found.num_recaptured += iteration > 0
        found.steps.append(iteration - group.captured_in)
        return state

    def put_back(self, group: Group, state: ResidentState, iteration: int) -> None:
        """Take a state back after its use: to keep, or to release."""
        if self.config.refresh.is_always or iteration + 1 >= self.config.num_iterations:
            state.release()
        else:
            group.state = state

    def _is_due(self, state: ResidentState, group: Group, iteration: int, found: Staleness) -> bool:
        rule = self.config.refresh
        if rule.every is not None:
            return iteration - group.captured_in >= rule.every
        if rule.drift is None:
            return True
        seed = derive_seed(self.config.seed, "probe", group.position, iteration)
        found.drifts.append(self.engine.drift(state, rule.num_segments, seed))
        return found.drifts[-1] > rule.drift

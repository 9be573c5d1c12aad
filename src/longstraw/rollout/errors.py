"""The error of a step that is not taken."""

from __future__ import annotations


class StepRefused(RuntimeError):
    """A number is not finite. Parameters and optimizer are as before; the message names the prompt."""

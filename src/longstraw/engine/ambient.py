"""What surrounds a call to the engine, so that it computes the same wherever it is called from.

A call runs one at a time for each model, in no mode of the caller's but autocast: a prompt is captured under one, and
the calls that follow are under the same. What cannot be left behind is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")


def engine_call(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """A method of the engine (whose `host` is a `ModelHost`) that runs the model."""

    @wraps(method)
    def call(engine: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with engine.host.turn.taken(), neutral(engine.host.device):
            return method(engine, *args, **kwargs)

    return _outside_compiled_graphs(call)


@contextmanager
def neutral(device: torch.device) -> Iterator[None]:
    """Leaves the caller's inference mode, grad mode and default device behind.

    Saved-tensor hooks act on the engine's graphs, a piece each, as they do on any.

    Raises:
        RuntimeError: inside a transform of torch.func, a trace, or where saved-tensor hooks are disabled.
    """
    _refuse_transforms()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())  # pieces that have a graph ask for it
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if _casts(device.type):
            torch.clear_autocast_cache()  # it may hold parameters as they were before an update
            stack.callback(torch.clear_autocast_cache)
        yield


@dataclass(frozen=True)
class Autocast:
    """What a type of device casts to under autocast; `dtype` None is without."""

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind) if _casts(kind) else None)

    def __str__(self) -> str:
        return f"torch.autocast({self.device_type!r}, {self.dtype})" if self.dtype else "no autocast"

    @contextmanager
    def again(self) -> Iterator[None]:
        """Has it in force, whatever the caller's is."""
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None):
            yield

    def require(self, device: torch.device) -> None:
        """Refuses a call under another autocast than this one, the state's.

        Raises:
            ValueError: names both.
        """
        found = Autocast.now(device)
        if found != self:
            raise ValueError(
                f"this state was captured under {self} and is used under {found}, which is another function: put "
                "capture, score, sample and backward under the same autocast"
            )


def _casts(device_type: str) -> bool:
    """Whether autocast is on; there is none on the meta device."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "the engine was called inside a transform of torch.func (grad, vmap, jvp, ...): it takes derivatives "
            "itself and writes them to .grad. Call it outside, and transform the objective instead"
        )
    if torch.jit.is_tracing():
        raise RuntimeError("the engine was called inside torch.jit.trace, which would record one call: call it outside")
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:
        raise RuntimeError(
            f"the engine was called where saved-tensor hooks are disabled ({disabled!r}), which it measures its graphs "
            "with: call it outside torch.autograd.graph.disable_saved_tensors_hooks"
        )


def _outside_compiled_graphs(call: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Has torch.compile break its graph at the call and not look inside; the compiler is loaded if it is in use."""
    disabled: list[Callable[..., R]] = []

    @wraps(call)
    def outside(engine: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return call(engine, *args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(call, reason="longstraw.Engine builds its graphs piece by piece"))
        return disabled[0](engine, *args, **kwargs)

    return outside

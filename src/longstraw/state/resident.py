"""The resident state of a captured prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longstraw.pages import PageStore
from longstraw.state.chain import Chain


class ResidentState:
    """What a prompt leaves behind: all that its responses need, and nothing of its graph.

    Made by `Engine.capture`. It holds the state after all prompt tokens but the last: that one belongs to the branches.

    Attributes:
        prompt_ids: [P], on the CPU.
        chain: the prompt's segments.
        store: the pages.
        grad_from: the first segment that gradients flow into; the number of segments when none do.
        parameter_version: what `ModelHost.parameter_version` was at capture: the state is stale once it differs.
        backbone: a weak reference to the model that it was captured with.
        autocast: what the engine was under at capture.
        kept: graphs of its last segments, if the engine kept some.
        boundary_stride: carried states are kept at every so many segment boundaries; None while there are none.
    """

    def __init__(
        self, prompt_ids: torch.Tensor, chain: Chain, store: PageStore, grad_from: int, parameter_version: int = 0
    ) -> None:
        self.prompt_ids = prompt_ids
        self.chain = chain
        self.store = store
        self.grad_from = grad_from
        self.parameter_version = parameter_version
        self.backbone: Callable[[], Any] = lambda: None
        self.autocast: Any = None
        self.kept: Any = None
        self.boundary_stride: int | None = None
        self._released = False

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return self.prompt_ids.numel()

    @property
    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes by kind of state and tier, as `{"kv": {"device": 1024}}`."""
        return self.store.nbytes()

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Frees every page; safe to call again."""
        if not self._released:
            self._released = True
            if self.kept is not None:
                self.kept.release()
            self.chain.truncate(0)
            self.store.close()

    def __enter__(self) -> ResidentState:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

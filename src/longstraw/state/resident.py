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
        parent: the state that this one was forked from, whose pages it shares; None for a captured one.
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
        self.parent: ResidentState | None = None
        self._released = False

    def fork(self) -> ResidentState:
        """A state that goes on from this one, to be grown by `Engine.extend`, scored and sampled from.

        It shares this one's pages and never changes them, and may itself be forked. Releasing this one ends it too.

        Raises:
            ValueError: this state was released.
        """
        if self.released:
            raise ValueError("this state was released: capture the prompt again")
        chain = self.chain.fork(1)
        chain.keep_last_states()
        grown = ResidentState(self.prompt_ids, chain, self.store, 0, self.parameter_version)
        grown.backbone, grown.autocast, grown.parent = self.backbone, self.autocast, self
        grown.kept = type(self.kept)() if self.kept is not None else None
        return grown

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return self.prompt_ids.numel()

    @property
    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes by kind of state and tier, as `{"kv": {"device": 1024}}`."""
        return self.store.nbytes()

    @property
    def released(self) -> bool:
        return self._released or (self.parent is not None and self.parent.released)

    def release(self) -> None:
        """Frees every page, of a fork its own; safe to call again."""
        if not self.released:
            if self.kept is not None:
                self.kept.release()
            self.chain.truncate(0)
            if self.parent is None:
                self.store.close()
        self._released = True

    def __enter__(self) -> ResidentState:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

"""Full attention: every token's key and value, in append-only pages of one piece each.

Shapes: B rows, T live tokens, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from longstraw.attention import kernels, paged
from longstraw.attention.interface import LIVE
from longstraw.pages import Page, PageStore
from longstraw.state.layer import LayerChain, LiveLayer
from longstraw.state.tail import Tail


class PagedChain(LayerChain):
    """K/V of one layer along one chain.

    Args:
        store: where the pages go.
        first_live: pages of pieces before this one are constants to every gradient.
        before: the pages that the chain continues from, with how many of them are constants.
    """

    def __init__(self, store: PageStore, first_live: int = 0, before: tuple[list[Page], int] = ([], 0)) -> None:
        self.store = store
        self.first_live = first_live
        self._before, self._num_constant = before
        self.pages: list[Page] = []

    def fork(self) -> PagedChain:
        constant = self._num_constant + min(self.first_live, len(self.pages))
        return PagedChain(self.store, before=(self._before + self.pages, constant))

    def enter(self, index: int, rows: int, graph: bool) -> LivePaged:
        return LivePaged(self._prefix(index))

    def commit(self, index: int, live: LivePaged, start: int) -> None:
        if index != len(self.pages):
            raise RuntimeError(f"piece {index} is committed after {len(self.pages)} pieces")
        self.pages.append(self.store.put("kv", start, live.written()))

    def outputs(self, index: int, live: LivePaged) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if index >= len(self.pages):  # the chain's last piece was never committed: nothing came after it
            return []
        cotangents = self.store.take_cotangent(self.pages[index])
        if cotangents is None:
            return []
        return [(written, c.to(written.dtype)) for written, c in zip(live.written(), cotangents)]

    def settle(self, index: int, live: LivePaged) -> None:
        """Nothing to move: the attention's backward has already added to the pages it read."""

    def stored(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.store.fetch(self.pages[index])

    def decoder(self, rows: int) -> DecodingPaged:
        return DecodingPaged(self._prefix(len(self.pages)))

    def truncate(self, num_pieces: int) -> None:
        while len(self.pages) > num_pieces:
            self.store.free(self.pages.pop())

    def drop_cotangents(self) -> None:
        for page in self.pages:
            self.store.drop_cotangent(page)

    def _prefix(self, index: int) -> paged.Prefix:
        constant = self._num_constant + min(self.first_live, index)
        return paged.Prefix(self.store, self._before + self.pages[:index], constant)


class LivePaged(LiveLayer, CacheLayerMixin):
    """Takes one piece's keys and values, and attends over the pages before them."""

    def __init__(self, prefix: paged.Prefix) -> None:
        super().__init__()
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.prefix = prefix

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, kwargs: dict[str, Any], **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = key_states, value_states
        kwargs[LIVE] = self
        self.complete()
        return key_states, value_states

    def stage(self) -> None:
        self.prefix.stage()

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        return paged.attend(query, key, value, self.prefix, scale)

    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values


class DecodingPaged(LiveLayer, CacheLayerMixin):
    """Grows a tail of B rows behind shared pages, token by token, without a graph."""

    def __init__(self, prefix: paged.Prefix) -> None:
        super().__init__()
        self.prefix = prefix
        self._key_tail, self._value_tail = Tail(), Tail()

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, kwargs: dict[str, Any], **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kwargs[LIVE] = self
        return self._key_tail.append(key_states), self._value_tail.append(value_states)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        merged = paged.Merge(
            *kernels.part_forward(query, key.to(query.dtype), value.to(query.dtype), scale, causal=False)
        )
        paged.attend_pages(merged, query, self.prefix, scale)
        return merged.out.to(query.dtype)

    def select(self, rows: torch.Tensor) -> None:
        for tail in (self._key_tail, self._value_tail):
            tail.select(rows)

"""Multi-head latent attention: every token's latent and rotary key, and its index key where a layer runs an indexer.

Both rest in append-only pages of one piece each, and apart: an indexer reads the index keys of all tokens, attention
the latents of few. Index keys collect no gradient.

Shapes: B rows, T live tokens, S tokens that a live layer holds, E latent rank plus rotary size, D index head size.
"""

from __future__ import annotations

import torch

from longstraw.attention.paged import Prefix
from longstraw.pages import Page, PageStore
from longstraw.state.layer import LayerChain, LiveLayer
from longstraw.state.tail import Tail


class LatentChain(LayerChain):
    """Latents of one layer along one chain.

    Args:
        store: where the pages go.
        first_live: pages of pieces before this one are constants to every gradient.
        before: (latent pages, index pages) that the chain continues from.
        num_constant: so many of the latent pages before are constants.
    """

    def __init__(
        self,
        store: PageStore,
        first_live: int = 0,
        before: tuple[list[Page], list[Page]] = ([], []),
        num_constant: int = 0,
    ) -> None:
        self.store = store
        self.first_live = first_live
        self._before, self._index_before = before
        self._num_constant = num_constant
        self.pages: list[Page] = []
        self.index_pages: list[Page] = []

    def fork(self) -> LatentChain:
        before = (self._before + self.pages, self._index_before + self.index_pages)
        return LatentChain(self.store, before=before, num_constant=self._constant(len(self.pages)))

    def enter(self, index: int, rows: int, graph: bool) -> LiveLatent:
        return LiveLatent(*self._prefixes(index))

    def commit(self, index: int, live: LiveLatent, start: int) -> None:
        if index != len(self.pages):
            raise RuntimeError(f"piece {index} is committed after {len(self.pages)} pieces")
        self.pages.append(self.store.put("latent", start, live.written()))
        if live.index_keys is not None:
            self.index_pages.append(self.store.put("index", start, [live.index_keys]))

    def outputs(self, index: int, live: LiveLatent) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if index >= len(self.pages):  # the chain's last piece was never committed: nothing came after it
            return []
        cotangent = self.store.take_cotangent(self.pages[index])
        if cotangent is None:
            return []
        return [(written, c.to(written.dtype)) for written, c in zip(live.written(), cotangent)]

    def settle(self, index: int, live: LiveLatent) -> None:
        """Nothing to move: the attention's backward has already added to the pages it read."""

    def stored(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.store.fetch(self.pages[index])

    def decoder(self, rows: int) -> DecodingLatent:
        return DecodingLatent(*self._prefixes(len(self.pages)))

    def truncate(self, num_pieces: int) -> None:
        for pages in (self.pages, self.index_pages):
            while len(pages) > num_pieces:
                self.store.free(pages.pop())

    def drop_cotangents(self) -> None:
        for page in self.pages:
            self.store.drop_cotangent(page)

    def _constant(self, index: int) -> int:
        return self._num_constant + min(self.first_live, index)

    def _prefixes(self, index: int) -> tuple[Prefix, Prefix]:
        latents = Prefix(self.store, self._before + self.pages[:index], self._constant(index))
        return latents, Prefix(self.store, self._index_before + self.index_pages[:index])


class LiveLatent(LiveLayer):
    """Takes what one piece's tokens leave behind, and hands it to the attention with the pages before.

    Attributes:
        prefix: pages (latents [R, S, E],).
        index_prefix: pages (index keys [R, S, D],); none where the layer runs no indexer.
        latents: [B, S, E] of the live tokens, here those of the piece.
        index_keys: [B, S, D], detached; None where the layer runs no indexer.
        chosen: [B, T, K] positions that the layer's indexer chose, where the model's adapter keeps them.
        weights: the attention's expansion weights, where the model's adapter keeps them from token to token.
    """

    decodes = False

    def __init__(self, prefix: Prefix, index_prefix: Prefix) -> None:
        self.prefix = prefix
        self.index_prefix = index_prefix
        self.latents: torch.Tensor | None = None
        self.index_keys: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None
        self.weights: tuple[torch.Tensor, torch.Tensor] | None = None

    def stage(self) -> None:
        self.index_prefix.stage()  # which latents are read is not known yet

    def write(self, latents: torch.Tensor, index_keys: torch.Tensor | None) -> None:
        """Takes the piece's latents [B, T, E] and index keys [B, T, D]; ends the forward pass if nothing reads on."""
        self.latents, self.index_keys = latents, index_keys
        self.complete()

    def written(self) -> tuple[torch.Tensor]:
        assert self.latents is not None
        return (self.latents,)


class DecodingLatent(LiveLatent):
    """Grows a tail of B rows behind shared pages, token by token, without a graph."""

    decodes = True

    def __init__(self, prefix: Prefix, index_prefix: Prefix) -> None:
        super().__init__(prefix, index_prefix)
        self._latents, self._index_keys = Tail(), Tail()

    def write(self, latents: torch.Tensor, index_keys: torch.Tensor | None) -> None:
        self.latents = self._latents.append(latents)
        self.index_keys = None if index_keys is None else self._index_keys.append(index_keys)

    def select(self, rows: torch.Tensor) -> None:
        for tail in (self._latents, self._index_keys):
            tail.select(rows)

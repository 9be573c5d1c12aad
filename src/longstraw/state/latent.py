"""Multi-head latent attention: every token's latent and rotary key, and its index key where a layer runs an indexer.

They are columns apart: an indexer reads the index keys of all tokens, attention the latents of few. Index keys collect
no gradient.

Shapes: B rows, T tokens of the piece, S tokens that the layer holds, E latent rank plus rotary size, D index head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longstraw.pages.prefix import Prefix
from longstraw.parallel.context import Context
from longstraw.state.appended import AppendedChain, AppendedPiece


class LatentPiece(AppendedPiece):
    """Takes what the tokens leave behind, and hands it to the attention with the pages before.

    Attributes:
        chosen: [B, T, K] positions that the layer's indexer chose, where the model's family keeps them.
        weights: the attention's expansion weights, where the model's family keeps them from token to token.
    """

    def __init__(self, prefixes: Sequence[Prefix], context: Context, grows: bool = False) -> None:
        super().__init__(prefixes, context, grows)
        self.chosen: torch.Tensor | None = None
        self.weights: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def prefix(self) -> Prefix:
        """Pages (latents [R, S, E],)."""
        return self.prefixes[0]

    @property
    def index_prefix(self) -> Prefix:
        """Pages (index keys [R, S, D],); none where the layer runs no indexer."""
        return self.prefixes[1]

    def stage(self) -> None:
        self.index_prefix.stage()  # which latents are read is not known yet

    def write(self, latents: torch.Tensor, index_keys: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Takes latents [B, T, E] and index keys [B, T, D], detached; returns those of all S tokens held."""
        held, index = self.extend((latents,), None if index_keys is None else (index_keys,))
        assert held is not None
        return held[0], None if index is None else index[0]


class LatentChain(AppendedChain):
    """See `AppendedChain`."""

    columns = ("latent", "index")
    piece = LatentPiece

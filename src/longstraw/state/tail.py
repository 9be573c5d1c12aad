"""A growing tail of decoded tokens: a buffer that doubles when full, without a graph."""

from __future__ import annotations

import torch


class Tail:
    """Tokens [B, ..., S, dim] of branches that decode side by side."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._used = 0

    def append(self, token: torch.Tensor) -> torch.Tensor:
        """Adds [B, ..., 1, dim]; returns a view of all tokens so far.

        Raises:
            RuntimeError: more than one token.
        """
        if token.shape[-2] != 1:
            raise RuntimeError(f"decoding takes one token at a time, got {token.shape[-2]}")
        if self._buffer is None or self._used == self._buffer.shape[-2]:
            grown = token.new_empty(*token.shape[:-2], max(64, 2 * self._used), token.shape[-1])
            if self._buffer is not None:
                grown[..., : self._used, :] = self._buffer
            self._buffer = grown
        self._buffer[..., self._used : self._used + 1, :] = token
        self._used += 1
        return self._buffer[..., : self._used, :]

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the given rows."""
        if self._buffer is not None:
            self._buffer = self._buffer[rows]

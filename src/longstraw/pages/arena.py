"""Host memory for pages, apart from the heap: what a page frees goes back to the system at once.

Pages live long and are freed one by one between short-lived activations; taken from the heap they would pin it in
fragments.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_CHUNK_BYTES = 64 << 20  # address space only: memory that was never written costs nothing
_ALIGN = mmap.PAGESIZE


@dataclass(frozen=True)
class Block:
    """Bytes in a chunk, and the tensors that lie in them. Tensors made of it must not outlive `Arena.free`.

    It holds no tensors: their headers, small and long-lived, would be what fragments the heap.
    """

    chunk: mmap.mmap
    offset: int
    nbytes: int
    layout: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Views of the block's memory, one tensor behind the other, each aligned to 64 bytes."""
        views, offset = [], self.offset
        for dtype, shape in self.layout:
            count = math.prod(shape)
            if count == 0:
                views.append(torch.empty(shape, dtype=dtype))
                continue
            views.append(torch.frombuffer(self.chunk, dtype=dtype, count=count, offset=offset).view(shape))
            offset += _aligned(count * dtype.itemsize, 64)
        return tuple(views)


class Arena:
    """Hands out blocks of anonymous memory, reusing freed ones of the same size."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0
        self._free: dict[int, list[Block]] = {}

    def keep(self, tensors: Sequence[torch.Tensor]) -> Block:
        """Copies tensors into a block."""
        layout = tuple((t.dtype, tuple(t.shape)) for t in tensors)
        nbytes = sum(_aligned(t.numel() * t.element_size(), 64) for t in tensors)
        block = replace(self._take(max(_ALIGN, _aligned(nbytes, _ALIGN))), layout=layout)
        for into, tensor in zip(block.tensors(), tensors):
            into.copy_(tensor)
        return block

    def free(self, block: Block) -> None:
        """Returns the block's memory to the system and keeps its address for reuse."""
        if hasattr(mmap, "MADV_DONTNEED"):
            block.chunk.madvise(mmap.MADV_DONTNEED, block.offset, block.nbytes)
        self._free.setdefault(block.nbytes, []).append(block)

    def _take(self, nbytes: int) -> Block:
        if self._free.get(nbytes):
            return self._free[nbytes].pop()
        if self._chunk is None or self._used + nbytes > len(self._chunk):
            self._chunk = mmap.mmap(-1, max(_CHUNK_BYTES, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._used = 0
        block = Block(self._chunk, self._used, nbytes, ())
        self._used += nbytes
        return block


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to

"""The page table: who owns which tokens' state, on which tier, in how many bytes. It holds no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Tier(StrEnum):
    """Where a page rests between two uses."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(eq=False)
class Page:
    """What one piece left behind in one layer: the tokens `start` to `start + num_tokens`.

    Attributes:
        kind: what it holds, for the accounting: "kv", "latent", "index", "recurrent", "convolved", "window" or
            "cotangent".
        start: absolute position of its first token.
        num_tokens: tokens it covers.
        rows: batch rows: 1 for the shared prompt, more for branches that run side by side.
        nbytes: bytes of its tensors.
        tier: where it rests now.
        pins: uses under way; a pinned page is never moved or freed.
        version: how often its content was replaced.
    """

    kind: str
    start: int
    num_tokens: int
    rows: int
    nbytes: int
    tier: Tier
    pins: int = 0
    version: int = 0
    number: int = field(default=-1)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


class PageTable:
    """Every page of one store that was not freed yet, in order of creation."""

    def __init__(self) -> None:
        self._pages: dict[int, Page] = {}
        self._next = 0
        self._used = dict.fromkeys(Tier, 0)

    def add(self, page: Page) -> Page:
        page.number = self._next
        self._next += 1
        self._pages[page.number] = page
        self._used[page.tier] += page.nbytes
        return page

    def used(self, tier: Tier) -> int:
        """Bytes on a tier."""
        return self._used[tier]

    def remove(self, page: Page) -> None:
        """Forgets a page.

        Raises:
            RuntimeError: the page is unknown (freed twice), or in use.
        """
        if page.number not in self._pages:
            raise RuntimeError(f"page {page.number} ({page.kind}, tokens {page.start}-{page.stop}) was already freed")
        if page.pins:
            raise RuntimeError(f"page {page.number} ({page.kind}, tokens {page.start}-{page.stop}) is in use")
        del self._pages[page.number]
        self._used[page.tier] -= page.nbytes

    def __contains__(self, page: Page) -> bool:
        return page.number in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes by kind and tier: `{"kv": {"host": 1024}, ...}`."""
        total: dict[str, dict[str, int]] = {}
        for page in self:
            by_tier = total.setdefault(page.kind, {})
            by_tier[page.tier.value] = by_tier.get(page.tier.value, 0) + page.nbytes
        return total

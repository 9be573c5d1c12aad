"""Where resident state lives: a page table without tensors, and a store that places pages on a tier."""

from longstraw.pages.store import PageStore
from longstraw.pages.table import Page, PageTable, Tier

__all__ = ["Page", "PageStore", "PageTable", "Tier"]

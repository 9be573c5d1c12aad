"""The page store: puts state pages on a tier, brings them to the device for use, and sums their cotangents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

from longstraw.pages.arena import Arena, Block
from longstraw.pages.disk import DiskFile, DiskFolder
from longstraw.pages.table import Page, PageTable, Tier
from longstraw.parallel.context import ALONE, Context
from longstraw.precision import wide_dtype

Tensors = tuple[torch.Tensor, ...]
Held = Tensors | Block | DiskFile
Arrival = tuple[Tensors, Any]  # a page's tensors, and the CUDA event after which they may be read


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One pair a device: PyTorch keeps freed memory by the stream that it was allocated on."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class _OneBehind:
    """Keeps the host one CUDA event behind the last that it queued."""

    def __init__(self) -> None:
        self._last: Any = None

    def wait(self, event: Any) -> None:
        before, self._last = self._last, event
        if before is not None:
            before.synchronize()


class PageStore:
    """Pages of one captured prompt and of the branches that start from it.

    A page's tensors are written once. Its cotangent (the gradient of the loss with respect to them) is summed in
    float32, or float64 for float64 pages, on the page's own tier or, where that is full, the next one down that has
    room: allocated at the first touch, gone when taken.

    Args:
        device: where pages are used.
        tier: where they rest: "device", "host" (pinned when the device is a GPU) or "disk".
        page_dir: parent directory of the disk tier's private directory; None is the system's temporary directory.
        context: who else holds pages of the prompt.
        budgets: bytes by tier. A page that does not fit on `tier` rests on the next one down that has room. Every pass
            reads all pages in a circle, so pages that stay where they are serve it better than any that trade places.
    """

    def __init__(
        self,
        device: torch.device | str,
        tier: str | Tier = Tier.DEVICE,
        page_dir: str | os.PathLike[str] | None = None,
        budgets: Mapping[str, int] | None = None,
        context: Context = ALONE,
    ) -> None:
        self.device = torch.device(device)
        self.context = context
        self.tier = Tier(tier)
        self.table = PageTable()
        self._page_dir = page_dir
        self._budgets = {Tier(name): nbytes for name, nbytes in (budgets or {}).items()}
        self._on_cpu = self.device.type == "cpu"
        # beside the compute: pages on their way to the device, and the sums of cotangents in host memory
        self._copies: torch.cuda.Stream | None = None
        self._sums: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._copies, self._sums = _streams(self.device)
        self._uses, self._added = _OneBehind(), _OneBehind()  # kernels that read a page; sums
        self._folder: DiskFolder | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._staged: dict[int, tuple[Page, Future[Arrival]]] = {}
        self._arena = Arena()
        self._held: dict[int, Held] = {}
        self._cotangents: dict[int, tuple[Page, Held]] = {}

    def put(self, kind: str, start: int, tensors: Sequence[torch.Tensor], token_dim: int | None = -2) -> Page:
        """Stores detached copies that own their memory.

        Args:
            kind: see `Page.kind`.
            start: absolute position of the first token.
            tensors: [rows, ..., tokens, dim] each; one tier, one dtype or several.
            token_dim: the dimension of the first tensor that counts tokens; None for state without one.
        """
        first = tensors[0]
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        page = Page(
            kind=kind,
            start=start,
            num_tokens=first.shape[token_dim] if token_dim is not None else 0,
            rows=first.shape[0],
            nbytes=nbytes,
            tier=self._place(nbytes, self.tier),
        )
        self.table.add(page)
        self._held[page.number] = self._rest(page, tensors)
        return page

    def fetch(self, page: Page) -> Tensors:
        """The page's tensors on the device. They must not be written to."""
        return self._bring(self._held[page.number])

    def stream(self, pages: Sequence[Page]) -> Iterator[tuple[Page, Tensors]]:
        """Yields pages in order while the next one is on its way.

        On a GPU the caller's work is only queued when it asks for the next page. It waits here until the use of the
        last page but one is over, so that no more than a few pages are on the device at a time.
        """
        ahead = self._taken_up(pages[0]) if pages else None
        try:
            for index, page in enumerate(pages):
                coming, ahead = ahead, None
                tensors = self.fetch(page) if coming is None else self._arrived(*coming)
                ahead = self._ahead(pages[index + 1]) if index + 1 < len(pages) else None
                yield page, tensors
                del tensors
                if self._copies is not None and page.tier is not Tier.DEVICE:
                    self._uses.wait(torch.cuda.current_stream(self.device).record_event())
        finally:
            if ahead is not None:
                wait([ahead[1]])
                ahead[0].pins -= 1

    def stage(self, page: Page) -> None:
        """Starts bringing a page that a stream is about to begin with; nothing to do where that takes no time."""
        if page.number not in self._staged:
            ahead = self._ahead(page)
            if ahead is not None:
                self._staged[page.number] = ahead

    def accumulate(self, page: Page, gradients: Sequence[torch.Tensor]) -> None:
        """Adds to the page's cotangent. The order of calls is the order of summation."""
        number = page.number
        if number not in self._cotangents:
            wide = tuple(g.to(wide_dtype(g.dtype)) for g in gradients)
            nbytes = sum(t.numel() * t.element_size() for t in wide)
            tier = self._place(nbytes, page.tier)
            record = self.table.add(Page("cotangent", page.start, page.num_tokens, page.rows, nbytes, tier))
            self._cotangents[number] = (record, self._rest(record, wide))
            return
        record, held = self._cotangents[number]
        record.version += 1
        if isinstance(held, DiskFile):
            total = held.read()
            for into, gradient in zip(total, gradients):
                into.add_(gradient.to("cpu"))
            held.write(total)
        elif self._sums is not None and record.tier is Tier.HOST and not isinstance(held, Block):
            self._add_aside(held, gradients)
        else:
            for into, gradient in zip(held.tensors() if isinstance(held, Block) else held, gradients):
                into.add_(gradient.to(into.device))

    def take_cotangent(self, page: Page) -> Tensors | None:
        """Hands the summed cotangent over and forgets it; None when nothing ever reached the page."""
        found = self._cotangents.pop(page.number, None)
        if found is None:
            return None
        record, held = found
        if self._sums is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._sums)
        try:
            tensors = self._bring(held)
            if isinstance(held, Block):  # its memory goes back at once
                tensors = tuple(t.clone() for t in tensors)
        finally:
            self._drop(record, held)
        return tensors

    def drop_cotangent(self, page: Page) -> None:
        """Forgets what reached the page, unread, as after a step that failed."""
        found = self._cotangents.pop(page.number, None)
        if found is not None:
            self._drop(*found)

    def free(self, page: Page) -> None:
        """Forgets a page with its cotangent.

        Raises:
            RuntimeError: it was already freed.
        """
        staged = self._staged.pop(page.number, None)
        if staged is not None:  # the stream never came
            wait([staged[1]])
            page.pins -= 1
        self.drop_cotangent(page)
        self._drop(page, self._held.pop(page.number, None))

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes by kind and tier."""
        return self.table.nbytes()

    def used(self) -> int:
        """Bytes of all pages on all tiers."""
        return sum(self.table.used(tier) for tier in Tier)

    def close(self) -> None:
        """Frees everything and removes the files."""
        if self._reader is not None:
            self._reader.shutdown()
            self._reader = None
        self._staged.clear()
        self._held.clear()
        self._cotangents.clear()
        self.table = PageTable()
        self._arena = Arena()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _place(self, nbytes: int, wanted: Tier) -> Tier:
        """The first tier from the wanted one down that has room.

        Raises:
            MemoryError: no tier has room.
        """
        tiers = list(Tier)
        for tier in tiers[tiers.index(wanted) :]:
            if self.table.used(tier) + nbytes <= self._budgets.get(tier, nbytes + self.table.used(tier)):
                return tier
        used = ", ".join(f"{tier} {self.table.used(tier):,} of {limit:,}" for tier, limit in self._budgets.items())
        raise MemoryError(f"no tier has room for a page of {nbytes:,} bytes (used: {used}): raise tier_bytes")

    def _rest(self, page: Page, tensors: Sequence[torch.Tensor]) -> Held:
        """Copies tensors to where the page rests; forgets the page if that fails."""
        try:
            if page.tier is Tier.DISK:
                if self._folder is None:
                    self._folder = DiskFolder(self._page_dir, page.nbytes)
                return self._folder.new_file(tuple(tensors))
            tensors = [t.detach() for t in tensors]
            if self._on_cpu:
                return self._arena.keep(tensors)
            host = page.tier is Tier.HOST
            where = torch.device("cpu") if host else self.device
            pin = host and self._copies is not None
            resting = (torch.empty(t.shape, dtype=t.dtype, device=where, pin_memory=pin) for t in tensors)
            return tuple(into.copy_(t) for into, t in zip(resting, tensors))
        except BaseException:
            self.table.remove(page)
            raise

    def _bring(self, held: Held) -> Tensors:
        if isinstance(held, DiskFile):
            held = held.read(pin=self._copies is not None)
        elif isinstance(held, Block):
            return held.tensors()
        return held if self._on_cpu else tuple(t.to(self.device, non_blocking=True) for t in held)

    def _taken_up(self, page: Page) -> tuple[Page, Future[Arrival]] | None:
        """The read that `stage` began. One that failed, in an earlier step perhaps, is begun anew."""
        staged = self._staged.pop(page.number, None)
        if staged is not None and staged[1].exception() is not None:
            page.pins -= 1
            return None
        return staged

    def _ahead(self, page: Page) -> tuple[Page, Future[Arrival]] | None:
        """Starts bringing a page, if that takes time."""
        if page.tier is Tier.DEVICE or (page.tier is Tier.HOST and self._on_cpu):
            return None
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="longstraw-pages")
        page.pins += 1
        return page, self._reader.submit(self._fetch_aside, page)

    def _fetch_aside(self, page: Page) -> Arrival:
        if self._copies is None:
            return self.fetch(page), None
        with torch.cuda.stream(self._copies):
            tensors = self.fetch(page)
            return tensors, self._copies.record_event()

    def _arrived(self, page: Page, future: Future[Arrival]) -> Tensors:
        page.pins -= 1
        tensors, event = future.result()
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(current)
        return tensors

    def _add_aside(self, totals: Tensors, gradients: Sequence[torch.Tensor]) -> None:
        """Adds to sums in pinned memory: up to the device, added there, and back, on a stream of their own.

        The caller waits for the last sum but one: gradients, whose memory is theirs until a sum is known to be over, do
        not pile up.
        """
        current, sums = torch.cuda.current_stream(self.device), self._sums
        assert sums is not None
        sums.wait_stream(current)
        with torch.cuda.stream(sums):
            for total, gradient in zip(totals, gradients):
                gradient.record_stream(sums)
                total.copy_(total.to(self.device, non_blocking=True).add_(gradient), non_blocking=True)
        self._added.wait(sums.record_event())

    def _drop(self, page: Page, held: Held | None) -> None:
        self.table.remove(page)
        if isinstance(held, DiskFile):
            held.close()
        elif isinstance(held, Block):
            self._arena.free(held)

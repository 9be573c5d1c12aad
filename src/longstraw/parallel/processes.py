"""The processes of a run: who this one is, and what they tell each other. Alone, everything stays local."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

Result = TypeVar("Result")
Item = TypeVar("Item")
PATIENCE = timedelta(days=1)  # one process may sample for hours while another waits; one that dies is noticed at once


class ProcessError(RuntimeError):
    """Another process of the run failed. The message has its number and its error."""


class Processes:
    """This process among those of a run.

    Args:
        rank: its number, from 0.
        size: how many there are.
        mesh: a DeviceMesh over them with the axis "data"; None for one alone.
    """

    def __init__(self, rank: int = 0, size: int = 1, mesh: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.mesh = mesh

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def owns(self, place: int) -> bool:
        """Whether the item at a place is this process's work: dealt one by one, shares differ by one at most."""
        return place % self.size == self.rank

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` in every process at once. Returns what it returned in each, by rank.

        What is returned travels by pickle; tensors in it have to be on the CPU.

        Raises:
            ProcessError: it raised elsewhere. In the process where it raised, that exception goes on.
        """
        if self.is_alone:
            return [work()]
        failure: Exception | None = None
        results: list[Result] = []
        try:
            results.append(work())
            told = (pickle.dumps(results[0]), "")
        except Exception as error:
            failure = error
            told = (b"", f"{type(error).__name__}: {error}")
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, told, group=self.mesh.get_group("data"))
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(everyone):
            if message:
                raise ProcessError(f"process {rank} of {self.size} failed: {message}")
        return [results[0] if rank == self.rank else pickle.loads(data) for rank, (data, _) in enumerate(everyone)]

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have every process hold the first one's values, in place."""
        if self.is_alone:
            return
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, group=self.mesh.get_group("data"), group_src=0)


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that torchrun started, joined by gloo and, with CUDA, NCCL; a group that is there already is used.

    Without torchrun: one process alone.
    """
    started = False
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_torchelastic_launched():
            yield Processes()
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
        started = True
    try:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        size = dist.get_world_size()
        yield Processes(dist.get_rank(), size, init_device_mesh(kind, (size,), mesh_dim_names=("data",)))
    finally:
        if started:
            dist.destroy_process_group()


def in_order(shares: Sequence[dict[int, Item]]) -> list[Item]:
    """What all processes made, by the place in the whole."""
    merged = {place: item for share in shares for place, item in share.items()}
    return [merged[place] for place in sorted(merged)]

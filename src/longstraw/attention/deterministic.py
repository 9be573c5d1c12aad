"""Backward kernels on CUDA that add in a fixed order: same input, same bits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_LOCK = threading.Lock()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """While the context lasts, PyTorch's attention kernels take their deterministic backward.

    They do so under `torch.use_deterministic_algorithms(True)` only, which would make other operations of a model
    raise; it is a flag of the process, so it holds for no longer than one call, by one thread at a time. The public
    function has the compiler loaded and told too: the flag alone is set here.
    """
    with _LOCK:
        before = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
        fill = torch._C._get_deterministic_fill_uninitialized_memory()
        torch._C._set_deterministic_algorithms(True, warn_only=False)
        torch._C._set_deterministic_fill_uninitialized_memory(False)  # a debugging aid that costs a pass over memory
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
            torch._C._set_deterministic_fill_uninitialized_memory(fill)

"""Completing parameter gradients over the mesh: every rank holds a partial sum, over what it ran itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from longstraw.precision import wide_dtype


class DataMesh:
    """The axes that gradients are summed over.

    Args:
        mesh: a DeviceMesh with the axis "data", or None for one process.

    Raises:
        ValueError: an axis that is not served.
    """

    def __init__(self, mesh: Any = None) -> None:
        self._group = None
        if mesh is None:
            return
        names = mesh.mesh_dim_names or ()
        if tuple(names) != ("data",):
            raise ValueError(
                f'mesh has the axes {tuple(names)}: only one axis "data" is served so far (each rank its own prompts); '
                'make it with init_device_mesh(..., mesh_dim_names=("data",))'
            )
        self._group = mesh.get_group("data")

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sums `.grad` over the ranks, in float32 at least; a rank without one contributes zero."""
        if self._group is None:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.sum(parameter.grad)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks, in place, in float32 at least."""
        if self._group is None:
            return
        total = tensor.to(wide_dtype(tensor.dtype))
        dist.all_reduce(total, dist.ReduceOp.SUM, self._group)
        if total is not tensor:
            tensor.copy_(total)

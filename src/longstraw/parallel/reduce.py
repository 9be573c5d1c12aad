"""Completing parameter gradients over the mesh: every rank holds a partial sum, over what it ran itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from longstraw.parallel.context import ALONE
from longstraw.parallel.ranks import RankContext
from longstraw.precision import wide_dtype

AXES = ("data", "context")


class GradientMesh:
    """The axes that gradients are summed over: ranks with other prompts ("data"), and ranks that share one ("context").

    Args:
        mesh: a DeviceMesh with axes among these, or None for one process.

    Attributes:
        context: who holds what of a prompt.

    Raises:
        ValueError: an axis that is not served.
    """

    def __init__(self, mesh: Any = None) -> None:
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        if mesh is not None and (not names or set(names) - set(AXES)):
            raise ValueError(
                f'mesh has the axes {names}: served are "data" (each rank its own prompts) and "context" (ranks share '
                'a prompt); make it with init_device_mesh(..., mesh_dim_names=("data", "context"))'
            )
        self._groups = [mesh.get_group(name) for name in names]
        shared = "context" in names and dist.get_world_size(mesh.get_group("context")) > 1
        self.context = RankContext(mesh.get_group("context")) if shared else ALONE

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sums `.grad` over the ranks, in float32 at least; a rank without one contributes zero."""
        if not self._groups:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.sum(parameter.grad)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks, in place, in float32 at least."""
        if not self._groups:
            return
        total = tensor.to(wide_dtype(tensor.dtype))
        for group in self._groups:
            dist.all_reduce(total, dist.ReduceOp.SUM, group)
        if total is not tensor:
            tensor.copy_(total)

"""The ranks of a mesh, row by row.

A mesh is a torch DeviceMesh, a process group, or, where a plan decides, a number of replicas of the model state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerostd.communication.dtensors import Rows
from zerostd.errors import PrepareError


@dataclass(frozen=True)
class Replicas:
    """A mesh of all ranks in this many rows of neighbours."""

    count: int


Mesh = DeviceMesh | dist.ProcessGroup | Replicas | None  # the ranks that train a model; None: all of them


def shape_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a DeviceMesh; without one it is empty."""
    return tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else ()


def rows_of(mesh: Mesh, device: torch.device) -> Rows:
    """Return the ranks of a mesh, row by row. The ranks of a row share the model state."""
    if mesh is None:
        return [list(range(dist.get_world_size() if dist.is_initialized() else 1))]
    if isinstance(mesh, Replicas):
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size % mesh.count:
            raise PrepareError(f"the plan has {mesh.count} replicas, but {size} rank(s) train: plan again for these")
        return [list(range(start, start + size // mesh.count)) for start in range(0, size, size // mesh.count)]
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 2:
            raise PrepareError(
                f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.shape)}: it must have one (shard) "
                "or two (replicate, shard). Select them, as in mesh['replicate', 'shard']"
            )
        if mesh.device_type != device.type:
            raise PrepareError(f"mesh has {mesh.device_type} devices, but the model is on {device}: use the same kind")
        rows = [[int(rank) for rank in row] for row in mesh.mesh.reshape(-1, mesh.shape[-1]).tolist()]
    elif isinstance(mesh, dist.ProcessGroup):
        rows = [dist.get_process_group_ranks(mesh)]
    else:
        raise PrepareError(f"mesh={mesh!r} must be a torch DeviceMesh or a process group")
    ranks = [rank for row in rows for rank in row]
    here = dist.get_rank()
    if here not in ranks:
        raise PrepareError(f"rank {here} is not in mesh, which has the ranks {ranks}: call prepare on those only")
    if max(ranks) >= dist.get_world_size():
        raise PrepareError(f"mesh has the ranks {ranks}, but the job has {dist.get_world_size()}: leave the others out")
    if ranks != sorted(set(ranks)):
        raise PrepareError(f"mesh has the ranks {ranks}: they must ascend row by row, as init_device_mesh orders them")
    return rows

"""Parameters that are DTensors over another mesh, as tensor parallelism makes them.

Flats hold local tensors. A `Spec` has the properties of a DTensor besides its local tensor: it converts local values to
the DTensor that the user's modules see, and back. It knows which box of the whole tensor this rank has, and how many
ranks have the same box. Gradients come with the placements of the backward pass, and take those of their parameter.

Our mesh and that of the DTensors share this rank alone. The ranks of both meshes together are the world of the model. A
*split* is the ranks with one coordinate in the mesh of the DTensors; model state is sharded inside a split.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerostd.compat import local_of, offsets_of, set_local
from zerostd.errors import MisuseError, PrepareError
from zerostd.sharding.boxes import Box

Rows = list[list[int]]  # the ranks of a mesh of ours, replica by replica


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor. Does not import the module that has them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True, eq=False)
class Spec:
    """The properties of a DTensor besides its local tensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]  # of the whole tensor
    box: Box  # of it that this rank has

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec | None:
        """Return that of a DTensor, None of another tensor."""
        if not is_dtensor(tensor):
            return None
        dtensor: Any = tensor
        sizes = tuple(local_of(dtensor).shape)
        offsets = offsets_of(dtensor.shape, dtensor.device_mesh, dtensor.placements)
        return cls(dtensor.device_mesh, tuple(dtensor.placements), tuple(dtensor.shape), Box(offsets, sizes))

    @property
    def _replicated(self) -> list[int]:
        return [dim for dim, placement in enumerate(self.placements) if placement.is_replicate()]

    @property
    def num_copies(self) -> int:
        """The ranks of the mesh that have the same local tensor."""
        return math.prod(self.mesh.size(dim) for dim in self._replicated)

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of those."""
        return all(self.mesh.get_local_rank(dim) == 0 for dim in self._replicated)

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Return local values as a DTensor in the same memory, outside autograd."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        with torch.no_grad():
            return DTensor.from_local(
                local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
            )

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return a DTensor with this shape and no values, of a dtype and device."""
        return self.wrap(torch.empty(self.box.sizes, dtype=like.dtype, device=like.device))

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of values with the whole shape: of a DTensor with any placements, or of a plain
        tensor that is equal on all ranks. All ranks of the mesh call it."""
        if not is_dtensor(values):
            if tuple(values.shape) != self.shape:
                raise MisuseError(f"a tensor of shape {tuple(values.shape)} for a DTensor of shape {self.shape}")
            return values[self.box.slices]
        dtensor: Any = values
        if dtensor.device_mesh != self.mesh:
            raise MisuseError(f"a DTensor over {dtensor.device_mesh} cannot replace one over {self.mesh}: use one mesh")
        with torch.no_grad():
            if tuple(dtensor.placements) != self.placements:
                dtensor = dtensor.redistribute(placements=self.placements)
            return local_of(dtensor)

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from local values. All ranks of the mesh call it."""
        dtensor: Any = self.wrap(local)
        with torch.no_grad():
            return cast(torch.Tensor, dtensor.full_tensor())

    def show(self, parameter: torch.Tensor, local: torch.Tensor) -> None:
        """Let a DTensor have these local values, and their dtype."""
        if parameter.dtype != local.dtype or not parameter.is_contiguous():
            other = torch.nn.Parameter(self.wrap(local), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, other)
        set_local(parameter, local)


def local_values(value: Any) -> Any:
    """Return the local tensor of a DTensor, and other tensors unchanged."""
    return local_of(value) if is_dtensor(value) else value


def check_dtensors(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse DTensors that cannot be sharded further."""
    first: tuple[str, DeviceMesh] | None = None
    for name, parameter in parameters:
        if not is_dtensor(parameter):
            continue
        dtensor: Any = parameter
        mesh = dtensor.device_mesh
        for placement in dtensor.placements:
            if type(placement).__name__ not in ("Shard", "Replicate"):
                raise PrepareError(
                    f"parameter {name!r} is a DTensor with placement {placement}: only Shard and Replicate can be "
                    "sharded further. Redistribute it before zerostd.prepare"
                )
        if parameter.device.type == "meta":
            raise PrepareError(
                f"parameter {name!r} is a DTensor on the meta device: give it memory with model.to_empty(device=...) "
                "and values before zerostd.prepare"
            )
        if mesh.get_coordinate() is None:
            raise PrepareError(f"parameter {name!r} is a DTensor over {mesh}, but this rank is not in that mesh")
        if first is not None and first[1] != mesh:
            raise PrepareError(
                f"parameters are DTensors over different meshes: {first[0]!r} over {first[1]}, {name!r} over {mesh}. "
                "Prepare them as separate modules, each with its mesh"
            )
        first = (name, mesh)


def mesh_of(parameters: Iterable[torch.Tensor]) -> DeviceMesh | None:
    """Return the mesh of those parameters that are DTensors; None if none is."""
    mesh: DeviceMesh | None = next((p.device_mesh for p in parameters if is_dtensor(p)), None)  # type: ignore[attr-defined]
    return mesh


def find_splits(rows: Rows, mesh: DeviceMesh | None) -> list[Rows]:
    """Return the rows of every split, by coordinate in the mesh of the DTensors. All ranks of that mesh call it."""
    if mesh is None:
        return [rows]
    here = dist.get_rank()
    ours = {rank for row in rows for rank in row}
    shared = sorted(ours & set(mesh.mesh.flatten().tolist()) - {here})
    if shared:
        raise PrepareError(
            f"the model has DTensors over {mesh}, but rank {shared[0]} is in that mesh and also among the ranks "
            f"{sorted(ours)} of mesh=: a dimension can be used once. Pass the other dimensions, as in "
            "prepare(model, optimizer, mesh=mesh['dp'])"
        )
    splits: list[Any] = [rows]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, splits, group=group)
        splits = [split for part in everyone for split in part]
    ranks = [rank for split in splits for row in split for rank in row]
    shapes = {(len(split), len(split[0])) for split in splits}
    if len(set(ranks)) < len(ranks) or len(shapes) > 1:
        raise PrepareError(
            f"mesh and {mesh} of the DTensors do not match: the ranks of their splits are {_listed(splits)}. Take both "
            "from one mesh, as in init_device_mesh(device, (2, 2), mesh_dim_names=('dp', 'tp'))"
        )
    return splits


def _listed(splits: Sequence[Rows]) -> str:
    return " and ".join(str([rank for row in split for rank in row]) for split in splits)


def check_layouts(splits: Sequence[Rows], nodes: Rows | None, control: dist.ProcessGroup) -> None:
    """Raise on all ranks if some were given another mesh of the same ranks, or other nodes, and would wait forever."""
    ranks = dist.get_process_group_ranks(control)
    layouts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(layouts, f"{splits}" if nodes is None else f"{nodes} as nodes", group=control)
    for rank, layout in zip(ranks, layouts, strict=True):
        if layout != layouts[0]:
            dist.destroy_process_group(control)
            placement = " and the same Placement(secondary_shards=...)" if "nodes" in f"{layout}{layouts[0]}" else ""
            raise PrepareError(
                f"rank {ranks[0]} has the ranks {layouts[0]} in its mesh, but rank {rank} has {layout}: pass the same "
                f"mesh={placement} on all ranks"
            )

"""Horovod's names over torch.distributed, with ZeRO underneath: a script of its users runs with one import changed.

import zerostd.horovod as hvd
"""

from zerostd.horovod.collectives import (
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    reducescatter,
)
from zerostd.horovod.optimizer import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters, join
from zerostd.horovod.world import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]

REMEDIES = {  # Horovod's names that do not exist here, by a part of the name
    "Adasum": "gradients are combined by hvd.Average or hvd.Sum",
    "process_set": "all processes take part in everything: leave process_set out",
    "ProcessSet": "all processes take part in everything: leave process_set out",
    "_async": "call the function of the same name without _async, which returns the result",
    "synchronize": "there are no _async functions to wait for",
    "poll": "there are no _async functions to wait for",
    "grouped_": "call the function of the same name without grouped_, for one tensor at a time",
    "sparse_": "call hvd.allreduce(tensor.to_dense())",
    "elastic": "restart from a checkpoint: see examples/elastic.py",
    "timeline": "use zerostd.record(optimizer.container, RUN_DIR)",
    "_built": "ask torch: torch.distributed.is_nccl_available(), is_gloo_available()",
    "_enabled": "ask torch: torch.distributed.is_nccl_available(), is_gloo_available()",
    "mpi_threads_supported": "there is no MPI underneath",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
}


def __getattr__(name: str) -> object:
    for part, remedy in REMEDIES.items():
        if part in name:
            raise AttributeError(f"hvd.{name} is not supported: {remedy}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

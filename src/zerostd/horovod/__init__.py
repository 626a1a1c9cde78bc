"""Horovod's names over torch.distributed, with ZeRO underneath: a Horovod script needs one changed import.

import zerostd.horovod as hvd
"""

import re

from zerostd.horovod.collectives import Average as Average
from zerostd.horovod.collectives import Compression as Compression
from zerostd.horovod.collectives import Max as Max
from zerostd.horovod.collectives import Min as Min
from zerostd.horovod.collectives import Product as Product
from zerostd.horovod.collectives import Sum as Sum
from zerostd.horovod.collectives import allgather as allgather
from zerostd.horovod.collectives import allgather_object as allgather_object
from zerostd.horovod.collectives import allreduce as allreduce
from zerostd.horovod.collectives import allreduce_ as allreduce_
from zerostd.horovod.collectives import barrier as barrier
from zerostd.horovod.collectives import broadcast as broadcast
from zerostd.horovod.collectives import broadcast_ as broadcast_
from zerostd.horovod.collectives import broadcast_object as broadcast_object
from zerostd.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from zerostd.horovod.optimizer import broadcast_optimizer_state as broadcast_optimizer_state
from zerostd.horovod.optimizer import broadcast_parameters as broadcast_parameters
from zerostd.horovod.optimizer import join as join
from zerostd.horovod.world import init as init
from zerostd.horovod.world import is_initialized as is_initialized
from zerostd.horovod.world import local_rank as local_rank
from zerostd.horovod.world import local_size as local_size
from zerostd.horovod.world import rank as rank
from zerostd.horovod.world import shutdown as shutdown
from zerostd.horovod.world import size as size

REMEDIES = {  # Horovod's names that do not exist here, as patterns
    "Adasum": "use hvd.Average or hvd.Sum",
    "process_set|ProcessSet": "all processes take part in everything: leave process_set out",
    "_async": "call the function of the same name without _async, which returns the result",
    "synchronize|poll": "there are no _async functions to wait for",
    "grouped_": "call the function of the same name without grouped_, for one tensor at a time",
    "sparse_": "call hvd.allreduce(tensor.to_dense())",
    "alltoall": "call torch.distributed.all_to_all_single",
    "reducescatter": "call torch.distributed.reduce_scatter_tensor",
    "cross_": "use hvd.rank() // hvd.local_size() and hvd.size() // hvd.local_size()",
    "elastic": "restart from a checkpoint: see examples/elastic.py",
    "timeline": "use zerostd.record(optimizer.container, RUN_DIR)",
    "_built|_enabled|mpi_": "use torch.distributed.is_nccl_available() or is_gloo_available()",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
}


def __getattr__(name: str) -> object:
    for pattern, remedy in REMEDIES.items():
        if re.search(pattern, name):
            raise AttributeError(f"hvd.{name} is not supported: {remedy}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

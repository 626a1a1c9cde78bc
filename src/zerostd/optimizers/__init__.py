"""The update of a shard: any element-wise torch optimizer, clipping, loss scale, the torch.optim interface."""

from zerostd.optimizers.elementwise import check_elementwise
from zerostd.optimizers.optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer", "check_elementwise"]

"""Adapters in an arena, and the process that runs the Triton kernels.

adapters        adapters in an arena, and the Triton operations over them
addends         addends of tokens with adapters and without
interpreter     makes Triton's interpreter faster
mixtures        adapters of mixtures of experts, in an arena
packing         matrices in an arena, one after the other
parts           devices that share A's rank, on one device
poisoned        memory that is NaN until a kernel writes it
popularity      batches whose adapters are more or less popular
worker          the process that runs Triton operations
worker_process  starts the worker, and calls it
"""

"""Tokens chosen from logits: the largest, or one that is drawn; and masks of allowed tokens.

`inference_svc.engine.compute.sampler` calls `reference` where logits lie in a device's memory, and
`native` on CPUs that have the library.

native     the operations in C++: a row at a time, in the cache, without temporary tensors
reference  the definitions, in torch
"""

from kernels.sampling.native import NativeChoice, RowParams

__all__ = ["NativeChoice", "RowParams"]

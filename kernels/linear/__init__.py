"""Base projections on the CPU: weights packed once, for products with any number of tokens.

`reference.linear` is the definition, `src/linear.cpp` of `kernels.native` the fast path.
"""

from kernels.linear.native import linear, linear_op
from kernels.linear.pack import PackedLinear

__all__ = ["PackedLinear", "linear", "linear_op"]

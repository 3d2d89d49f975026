"""Base projections on the CPU: weights packed once, for products with any number of tokens.

native     the projection in C++: for programs, at fixed addresses, and over tensors
pack       weights in the order in which `src/linear.cpp` reads them
reference  the definition: plain torch, fp32
"""

from kernels.linear.native import linear, linear_op
from kernels.linear.pack import PackedLinear

__all__ = ["PackedLinear", "linear", "linear_op"]

"""Recurrences: mixers whose state of a sequence has a fixed size.

native     the operations in C++, for programs, at fixed addresses
reference  the definitions: plain torch, fp32
"""

from __future__ import annotations

from kernels.recurrence.reference import (
    Segments,
    causal_conv,
    gated_conv,
    gated_delta,
    gated_norm,
)

__all__ = ["Segments", "causal_conv", "gated_conv", "gated_delta", "gated_norm"]

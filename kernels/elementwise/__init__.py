"""What the decoder computes between its projections, in C++.

The definitions are the decoder's own torch modules (`inference_svc.model.layers`); these round
where those round.

native  the operations for programs: each builds its arguments at fixed addresses
"""

from kernels.elementwise.native import gather_op, rms_norm_op, swiglu_op

__all__ = ["gather_op", "rms_norm_op", "swiglu_op"]

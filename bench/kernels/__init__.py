"""Native kernels by themselves, and the bounds of this machine.

attention    compares attention on the CPU in the C++ kernels and in torch, with its bytes and
             products
experts      times a mixture of experts on the CPU against its floor, with adapters, and against
             transformers
gemm_shapes  times matrix products in the order of a step, with every kernel of this machine
linear       compares our base projections with oneDNN's and its packed weights, in bf16
lora         compares LoRA of one bench-200m step in native operations and in torch, without a base
             model
quantised    compares products with quantised weights with those in bf16, in the order of a step
recurrence   times the native kernels of gated delta nets, against the read of as many bytes as they
             move
roofline     measures the floors of a step's time on this machine, with the methods of our
             benchmarks
sampling     times the choice of tokens from logits on the CPU: native against its definition in
             torch
"""

"""Benchmarks, and the peers that they compare with. The product never imports this package.

gpu_model  a step on a GPU, without a GPU: its launches, bytes and time on the host
store      the adapter store by itself
kernels    native kernels by themselves, and the bounds of this machine
workloads  callers' workloads against whole services
"""

"""The machine that this process runs on.

memory       Its resident set, and what the machine and its control groups leave.
cpus         The processors that it may use, and how threads share them.
device_info  The name and the properties of the device that computes.
cuda_memory  What is free on the CUDA device, asked for without a context that stays.
copies       Small host data on its way to the device.
"""

"""The machine that this process runs on.

memory         Its resident set, and what the machine and its control groups leave.
cpus           The processors that it may use, and how threads share them.
device_info    The name and the properties of the device that computes.
cuda_memory    What is free on the CUDA device, and who has the rest.
device_faults  What its errors mean, and what operators can do.
copies         Small host data on its way to the device.
"""

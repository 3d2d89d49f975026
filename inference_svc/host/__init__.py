"""The machine that this process runs on.

memory         Its resident set, and the free memory of the machine and its control groups.
cpus           The processors and cores that it may use, and how threads share them.
device_info    The name and the properties of the device that computes.
cuda_memory    The CUDA device's free memory, and who has the rest.
device_faults  The meaning of its errors, and operators' remedies.
copies         Small host data on its way to the device.
"""

"""A CUDA device: Triton kernels, steps recorded and replayed.

backend       a CUDA device: Triton kernels, steps recorded and replayed
padded_sizes  the sizes that steps are padded to, so that few recordings serve all of them
graphs        the recordings, one for each of these sizes, and when they are made
inputs        a step's inputs at fixed addresses, filled on the host and sent
lora          a step's LoRA plans at fixed addresses
segments      where a step's rows find recurrent states, at fixed addresses
needs         the device memory that it needs, computed without a device
steps         inputs and results of all steps, at fixed addresses
pages         the page table on the device, of which a step sends the new cells
"""

"""A CUDA device, or one for each rank: Triton kernels, steps recorded and replayed.

factory       describes it before anything is allocated, and makes it
backend       steps at fixed addresses, replayed where they are recorded
rank          a rank's part of steps, which all ranks replay together
exchange      sums and rows that ranks exchange on their devices
memory        weights, pages, states, inputs and results, which a sleeping server gives back
padded_sizes  the sizes that steps are padded to, so that few recordings serve all of them
graphs        the recordings, one for each of these sizes, and when they are made
inputs        a step's inputs, pictures too, at fixed addresses, filled on the host and sent
lora          a step's LoRA plans at fixed addresses
segments      where a step's rows find recurrent states, at fixed addresses
needs         the device memory that it needs, computed without a device
rank_needs    the part of this that ranks need for each other
steps         inputs and results of all steps, at fixed addresses
pages         the page table on the device, of which a step sends the new cells
"""

"""The operations that the GPU run measures, each with its inputs and its definition.

expert_cases  the steps of a mixture of experts of one layer
family_cases  operations that only some model families use
delta_cases   the operations of a gated delta net
kernel_cases  the problems that measure the kernels' constants
lora_cases    LoRA of one group of projections over uncached memory, ours and the peers'
peers         the peers' LoRA kernels, from the files in the pack
quantised_cases  a layer's products with weights in few bits
"""

"""The operations, each with its plain definition beside the fast ones.

attention         attention over keys and values that lie in pages
dispatch          which of an operation's implementations runs
elementwise       norms, gathers and activations between projections
experts           mixtures of experts: routing, and products of each row with its expert
host_memory       large host memory that is there from the start
linear            base projections on the CPU, with weights packed once
lora              LoRA of many adapters in one batch, over one arena
native            the C++ sources: compiled, loaded and called through a C ABI
pictures          operations that vision towers alone have
quantised         weights in few bits: their formats, and products with them
ranks             values that processes exchange, each of which computes a part of a model
recurrence        mixers whose state of a sequence has a fixed size
replaced          weights of the base that adapters have of their own
sampling          tokens chosen from logits, and masks of the tokens that are allowed
streams           queues of work on a device, and marks in them
triton_launchers  Triton's launch modules, compiled ahead for machines without a C compiler
tuning            the constants of Triton's kernels, a table for each device
"""

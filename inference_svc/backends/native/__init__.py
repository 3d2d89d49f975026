"""CPUs with AVX2 or better: the decoder as one program in C++.

backend      CPUs with AVX2 or better, and the memory that the program runs in
program      the decoder as one program in C++
ops          each operation in C++, with adapters' operations beside it
adapter_ops  the interface of adapters' operations, and their groups
projections  packed weights, and the operations that compute with them
attention    the memory and the operations of attention
encoder      the operations of encoders, and the memory of their attention
towers       vision towers, whose units are programs
states       where a step's rows find recurrent states
workspace    the memory of a step's values, which is shared over time
needs        its memory, before any of it is allocated
exchange     sums and rows that ranks exchange within a program
buffers      the inputs of that program, at fixed addresses
lora         the operations that add LoRA in that program
"""

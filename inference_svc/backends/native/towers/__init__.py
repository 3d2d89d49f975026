"""Vision towers in C++.

tower       computes parts of tiles, unit by unit
units       a unit of its work as one program, over fixed buffers
tiles       the memory of a tile
operations  makes the operations that towers alone have
lora        adapters of a part's rows, which have one in common
memory      the inputs of a part at fixed addresses
"""

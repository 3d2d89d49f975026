"""The CPU operations in C++: compiled when a compiler is there, called through a C ABI.

build            compiles the sources, once per instruction set and state of the sources
library          the compiled library: its operations by name, and programs made of them
tile_permission  Linux's permission for the tile registers of AMX
"""

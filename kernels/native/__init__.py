"""The CPU operations in C++: compiled when a compiler is there, called through a C ABI."""

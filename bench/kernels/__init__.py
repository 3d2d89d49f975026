"""Native kernels by themselves, and the bounds of this machine."""

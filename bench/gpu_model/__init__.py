"""A step on a GPU, without a GPU: its launches, bytes and time on the host."""

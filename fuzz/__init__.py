"""Fuzzing of all code that reads bytes from strangers: `make fuzz`, or `python -m fuzz --help`."""

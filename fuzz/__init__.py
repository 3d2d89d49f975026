"""Fuzzing of everything that reads bytes of strangers: `make fuzz`, or `python -m fuzz --help`."""

"""Encoders: their operations, which the walk lists beside those of decoders.

operations  their operations as data, and the functions that list them
in_torch    computes them
"""

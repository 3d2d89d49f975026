"""Encoders: their operations, which the walk lists beside those of decoders.

operations  their operations as data, and the functions that list them
towers      the same of vision towers
in_torch    computes them
"""

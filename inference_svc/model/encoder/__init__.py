"""Encoders: their operations, which the walk lists beside those of decoders.

operations  their operations as data, and the functions that list them
clips       linear layers whose inputs and outputs are clipped
towers      the same of vision towers
tiles       the order in which a tower computes the patches of a tile
in_torch    computes them
"""

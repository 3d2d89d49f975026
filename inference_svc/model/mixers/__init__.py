"""Mixers with a recurrent state. Attention is in `model.description` and `model.operations`.

gated_delta  the gated delta rule: description, operations, and their place in the walk
short_conv   the gated short convolution: description, operation, and its place in the walk
in_torch     their definitions in torch
"""

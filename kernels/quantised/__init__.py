"""Weights in few bits: their formats, and products with them.

formats    the meaning of codes, and the shape of their scales
rows       rows of a weight as codes with scales, in which all checkpoint formats agree
quantise   makes such rows of plain weights, by rounding to nearest
reference  the definition: dequantise, then multiply
"""

from kernels.quantised.formats import Activations, Codes, WeightFormat
from kernels.quantised.quantise import quantise
from kernels.quantised.rows import QuantisedRows

__all__ = ["Activations", "Codes", "QuantisedRows", "WeightFormat", "quantise"]

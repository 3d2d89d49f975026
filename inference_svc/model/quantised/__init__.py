"""The published formats of quantised checkpoints.

scheme  the protocol of a format
"""

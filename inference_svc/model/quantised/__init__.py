"""The published formats of quantised checkpoints."""

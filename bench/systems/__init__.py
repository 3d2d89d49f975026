"""Servers under measurement, ours and the peers, all with the same few messages."""

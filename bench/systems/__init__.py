"""Servers under measurement, ours and the peers, each behind the same few messages."""

"""Measures a running server as its callers see it, and compares with an earlier measurement."""

"""Callers' workloads against whole services."""

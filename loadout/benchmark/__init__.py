"""Measures a running server as its callers see it, and compares with an earlier measurement.

workload  the requests of a round, the same for the same settings
measure   runs a workload, and computes the metrics
result    a measurement as a file
compare   compares two measurements: conditions, tolerances, regressions
"""

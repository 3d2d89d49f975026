"""The engine: schedule, run, settle; reachable only through messages (`handle`)."""

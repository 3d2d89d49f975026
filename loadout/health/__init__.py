"""Checks a service's health, for probes that need TLS and for compose.

__main__  `python -m loadout.health HOST:PORT`
"""

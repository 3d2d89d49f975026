"""Loadout's store under vLLM: adapters by name, checked, versioned, and current.

plugin    vLLM's entry points: the resolver, and the endpoint plugin that starts the rest
resolver  names to requests of vLLM's, which follow the catalog
"""

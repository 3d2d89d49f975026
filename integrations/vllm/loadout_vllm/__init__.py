"""Loadout's store under vLLM: adapters by name, checked, versioned, and current.

plugin        vLLM's entry points: the resolver, and the endpoint plugin that starts the rest
resolver      names to requests of vLLM's, which follow the catalog
model_shapes  the running model's layers and matrices, which an adapter has to fit
"""

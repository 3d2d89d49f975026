"""A sidecar that keeps SGLang's adapters as the store's catalog has them.

__main__  the command
engine    SGLang's HTTP calls for adapters
sidecar   loads and unloads, until the engine has what the catalog has
table     tells over HTTP which version of each name is loaded
"""

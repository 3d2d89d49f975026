"""The inference service's contract, one package per version: v1."""

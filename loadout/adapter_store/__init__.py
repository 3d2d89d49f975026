"""The adapter store's contract, one package per version: v1."""

"""The adapter store's contract.

v1  the stubs that protoc generates, compatible within the version
"""

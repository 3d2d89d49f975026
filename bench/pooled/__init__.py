"""Embeddings of encoders, beside other servers and libraries.

peer   a peer in its own environment, which answers line by line
texts  texts per second of ours and the peers, with one adapter and with many
"""

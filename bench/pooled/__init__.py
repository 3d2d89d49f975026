"""Embeddings of encoders, beside other servers and libraries.

peer   a peer in its own environment, which answers line by line
heads  the time of a text with one adapter that has a head of its own, and with a thousand
texts  texts per second of ours and the peers, with one adapter and with many
"""

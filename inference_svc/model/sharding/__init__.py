"""A model over several ranks: the part of a description that one rank has, and what ranks exchange.

description  cuts a decoder's description into the parts of ranks
norms        norms over the heads of all ranks, in the walk
stages       cuts a decoder's layers into stages
pictures     which ranks have the vision tower, and which take in its embeddings
exchange     the sums and rows that ranks exchange within a step
in_torch     the operations of ranks in torch
"""

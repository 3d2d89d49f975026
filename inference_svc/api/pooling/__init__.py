"""Calls that pool inputs instead of generating, independent of their transport.

call      the fields and limits that they have in common, and the results of their inputs
embed     a call to embed: its fields, and the vectors of its inputs
score     a call to score documents: the question about each, and the scores
classify  a call to classify: its fields, and the labels of its inputs
"""

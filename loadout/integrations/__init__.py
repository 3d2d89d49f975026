"""Trainers of other projects on Loadout. Each module needs the package that it is named after.

trl  TRL's asynchronous GRPO: it pushes policies to the store, and samples from every replica
"""

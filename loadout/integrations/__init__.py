"""Trainers of others on Loadout. Each module needs the package that it is named for.

trl  TRL's asynchronous GRPO: policies are pushed to the store, samples come from every replica
"""

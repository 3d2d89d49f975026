"""The state of sequences: what a step leaves behind for the next one, in kinds.

states     all kinds as one, as the scheduler, settle and preemption use them
kind       what a kind of state has to offer
pages      keys and values, which grow with a sequence
recurrent  states of a fixed size, of mixers that fold all tokens into one
prefix     the keys by which sequences with equal prefixes share state
pool       units of memory with reference counts and keys
"""

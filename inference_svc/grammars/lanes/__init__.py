"""Processes that compute the masks of running sequences: lanes.

lane      rows, and the thread of the engine's that talks to their process
process   the process, its memory of masks, and the slots of rows in it
memory    memory that a process writes masks to, and the engine reads
messages  messages between the engine and a process
rows      the sequences of a process: their grammars, and the masks that are due
"""

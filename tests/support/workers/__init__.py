"""The processes that run tests.

late_grammars  grammars that are read when one is needed
processes      marks tests that start processes, and stops others from doing so
share          a folder and a process that forks, which the workers of one run share
"""

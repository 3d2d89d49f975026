"""Runs both services as real processes and loads them over gRPC, for the stage of this name.

`folder` makes the folder that they run from, `program` runs in it with `checkpoints` and `streams`,
and `figures` makes rows of the table.
"""

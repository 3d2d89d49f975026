"""Runs both services as real processes and loads them over gRPC, for the stage of this name.

`folder` makes the folder that they run from, `program` runs in it with `checkpoints` and `streams`,
and `figures` makes rows of the table.

checkpoints  writes a Llama model with random weights, and random adapters, as their authors' tools
             do
figures      makes figures of rounds of streams, and a table of them
folder       makes the folder that the services run from
plan         the plan that the stage hands to its program, as JSON
program      starts both services, loads them, and prints the results so far as JSON, a line each
             time
streams      generates from many streams at once over gRPC, and notes when their tokens arrive
"""

"""The adapter store by itself.

adapters      makes adapters and layouts for the store's benchmarks, with real shapes and random
              weights
catalog       times a list page, a lookup, a watch and a start of a catalog with many adapters
cold          times a cold adapter phase by phase, from its source to the first and the last byte of
              its image
copy          the store in memory for an engine in its own process, and the messages to it
memory        measures the store's memory with many adapters and many slow readers
memory_store  a store in the engine's process that serves compiled images from memory, with many
              variants
process       runs the real store in its own process, with a plain gRPC stream in the same process
              that pulls are compared with
pull          compares the store's stream of an image with a plain gRPC stream between the same two
              processes
"""

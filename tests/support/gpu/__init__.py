"""Models, adapters and streams for tests of a device, real or emulated.

emulated_ranks  ranks of devices, over a CPU's memory
features        the configs of tiny models for every feature
live_bytes      the memory that operations of torch allocate
late_streams    streams of a device that works as late, and in as bad an order, as it may
lora            LoRA of one step at fixed addresses
models          tiny decoders with random weights, adapters for them, and batches of their steps
needs           the memory that a step really allocates
pictures        tiny models that read pictures, and prompts with a picture for them
shortage        a device with little memory, real or not
"""

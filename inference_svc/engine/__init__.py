"""The engine: schedules, computes and settles one batch per step; driven by messages.

control        what operators ask of an engine: commands, sleep, status and details
transport      where the engine runs: a thread or a process, and the messages to and from it
compute        computes a batch: runs it, chooses tokens, and measures it
policy         decides which sequences a step computes, in plain Python without tensors
ranks          a model over several processes
engine         one step: take messages, schedule, run, settle
build          makes an engine from its config
costs          the costs of a model's tokens and pictures
memory_budget  the engine's use of each memory, and whether it fits
memory_fit     the sizes that settings leave open, chosen for a device
"""

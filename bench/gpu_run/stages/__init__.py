"""What each stage does: a module for each, whose `run(context)` returns what it has found.

compile_kernels  every kernel compiled, in many processes at once; how long a start takes
correct          tests/gpu, then compute-sanitizer on a step that decodes and a mixed one
decode           steps of rows, adapters and contexts, their share of the floor, the engine's loop
env              versions, and what the device gives: by this all others' shares are reckoned
kernels          what only some families compute; LoRA of every group beside the peers, tuned or not
loads            images into the arena, alone and beside steps
parity           the whole engine gives the tokens that were recorded on a CPU
prefill          prompts: the time to the first token, the host's part, attention beside torch's
trace            the profiler's trace of a recorded step and of a mixed one
tune             the constants of kernels, ours and the peers', measured for as long
"""

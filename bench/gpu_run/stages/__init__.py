"""A module for each stage, whose `run(context)` returns the stage's results.

compile_kernels  compiles every kernel, in many processes at once; then times a start
correct          runs tests/gpu, then compute-sanitizer on a decode step and on a mixed one
decode           times decode steps against the floor, and the engine's loop
env              versions, and the device's rates, on which all other stages' shares are based
kernels          times operations of some families, and LoRA of every group against the peers'
loads            times copies of images into the arena, alone and during steps
parity           compares the whole engine's tokens with tokens recorded on a CPU
prefill          prompts: the time to the first token, the host's part, attention against torch's
trace            writes the profiler's trace of a recorded step and of a mixed one
tune             measures the constants of kernels, ours and the peers', for the same time
ranks            checks and times exchanges of ranks, and the end of one; tokens of two ranks
quantised        times products with weights in few bits against the bytes that they read
services         loads both services over gRPC: times and rates as a user sees them
pictures         times a tower, the first token behind a picture, and decode steps beside pictures
"""

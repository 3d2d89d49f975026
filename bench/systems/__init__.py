"""Servers under measurement, ours and the peers, all with the same few messages.

child       the systems to measure, and the parent's side of each system's process
llama_cpp   llama.cpp in this process, in its own environment (see `bench.peers.install`)
ours        our engine in a thread of this process, over a store in memory
ours_grpc   our system as in use
ours_steps  our engine with a GGUF file, one step after the other
peft        transformers, and PEFT's mixed batches, in their own environment
protocol    the messages to and from a system
serve       the child's side
vllm        vLLM's CPU build in this process, in its own environment (see `bench.peers.install`)
worker      a process that answers line by line, and is idle while others are measured
"""

"""Benchmarks, and the peers that they compare with. The product never imports this package.

engine            runs our engine in the benchmark's process, driven by messages as in the product
engine_transport  compares the engine in a thread of the gRPC server with the engine in its own
                  process
ranks             measures steps of a model that several processes compute together
few_bits          compares steps with base weights in few bits with bf16
float8_adapters   the cost of float8 adapters in accuracy, and how many more of them are resident
kv_exactness      measures the cost of keys and values in FP8 in exactness
machine           describes the machine of a result, and our kernels on it
models            the benchmarks' models and adapters
plots             draws one plot for each workload, from its summary
results           writes results as JSON next to a plot, and shows them as a table on the terminal
scrape            measures a scrape of /metrics with many adapters, from both services as real
                  processes
services          runs both services as real processes, as `loadout up` does, with methods for
                  benchmarks
step_breakdown    divides the time of a decode step into its parts, with the floor
stepper           an engine whose steps the caller's thread runs one by one
turns             compares the speed of two checkouts in turns
gguf              GGUF files, and llama.cpp on the same files as ours
gpu_model         a step on a GPU, without a GPU: its launches, bytes and time on the host
gpu_run           the GPU run
images            images in prompts, beside transformers and PEFT
kernels           native kernels by themselves, and the bounds of this machine
pooled            embeddings of encoders, beside other servers and libraries
peers             sets up the other servers that ours is compared with
store             the adapter store by itself
structured        structured answers: the cost of masks, and of grammar engines
systems           servers under measurement, ours and the peers, all with the same few messages
workloads         callers' workloads against whole services
"""

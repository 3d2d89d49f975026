"""The GPU run: all measurements and tests that need a GPU, in one command, or in two of under ten
minutes each.

    python -m bench.gpu_run --out FOLDER             on a machine with a CUDA device
    python -m bench.gpu_run --out FOLDER --emulate   on the CPU, through Triton's interpreter

Each of the fourteen stages runs in a process of its own, so that an error of one, even of the
device, does not affect the next. The run needs torch, triton, numpy and pytest, and the pack's
wheels for the services; `docs/development/gpu-run.md` describes the stages and their results.

cases         the operations that are measured, ours and the peers'
compile_pool  runs jobs such as compilation in many processes, until a deadline
context       the inputs of a stage: device, sizes, timer, deadline, results of earlier stages
emulation     replaces the device where there is none
goals         each goal, its measurement, and whether the goal is met
model         the model under measurement, with random weights and adapters, and its steps
one_step      single steps of a model of one layer, to run under compute-sanitizer
pack          the files that the device's machine cannot fetch
results_file  the file of results, rewritten while stages run and after each
run           runs the stages one after the other
services      both services as processes, loaded over gRPC
shared_tests  a plugin of pytest, with which processes share the tests of one run
sizes         the sizes of measurements: Llama-3-8B, or tiny ones for emulation
stages        a module for each stage
timing        microseconds on the device, and seconds on the host
tuning_space  the constants that the stage `tune` tries
"""

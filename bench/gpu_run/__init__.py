"""The GPU run: everything that has to be found out on a GPU, in one command of under ten minutes.

    python -m bench.gpu_run --out FOLDER             on a machine with a CUDA device
    python -m bench.gpu_run --out FOLDER --emulate   on the CPU, through Triton's interpreter

Ten stages, each in a process of its own: what one breaks, a device in a state of error too, does
not reach the next. It needs torch, triton, numpy and pytest; `docs/development/gpu-run.md` says
what the stages are and what they write.

compile_pool  work for many processes at once, such as compiling, that ends in time
context       what a stage is given: device, sizes, timer, deadline, what earlier stages found
emulation     what stands for the device where there is none
expert_cases  mixtures of experts of one layer, each step of it beside its definition
family_cases  what only some families compute, each beside its definition
goals         each goal beside what was measured, and whether it is met
kernel_cases  what the kernels' constants are measured with
lora_cases    LoRA of one group of projections over memory that no cache holds, ours and the peers'
model         the model under measurement, with random weights and adapters, and its steps
one_step      single steps of a model of one layer, to be run under compute-sanitizer
pack          makes the folder of what the device's machine cannot fetch
pack_store    reads it: the store of its adapters
peers         the peers' LoRA kernels, from the files in the pack
results_file  the one file of results, rewritten after each stage
run           the stages, one after the other
safetensors   reads the model where the library of that name is not installed
sizes         how much is measured: of Llama-3-8B, or of next to nothing in emulation
stages        what each stage does
timing        microseconds on the device, and seconds on the host
"""

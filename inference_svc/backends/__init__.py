"""How one step is computed on a kind of device: the only folder that distinguishes them.

native          CPUs with AVX2 or better: the decoder as one program in C++
cuda            a CUDA device: Triton kernels, steps recorded and replayed
base            the protocols Backend and BackendFactory, and the allocations common to all backends
adapter_memory  the part of a backend that holds adapters
arena           the tensor that holds every resident adapter, and the table that finds them
select          the list of backends, and the choice among them
torch           the definition: operation by operation, for any CPU and dtype
lora_step       adapters of a step, where torch computes it operation by operation
torch_needs     the memory of steps in torch
exchange        the sums that ranks exchange, by torch.distributed, and where ranks meet
step_data       a step as plain numbers, for other ranks
speed_notes     why a machine computes more slowly than it could, for operators
prompt_runs     the tokens of a step that are scored or pooled
slot_runs       which slots compute which tokens of a step
pictures        the embeddings of pictures, and the tower that makes them
magnitudes      DoRA's magnitudes, divided by the norms of the outputs that they scale, at load

To add one: write `backends/NAME.py`, or a folder of that name, and add its factory to
`select.BACKENDS`, before the backends that it is preferred to. Its `BackendFactory`

1. `supports` says whether it computes on `config.device` with these settings; `features` names the
   parts of models that it computes: a model that has more is refused at start by name;
   `speed_notes` says what would be faster, for the log, GetServerInfo and `loadout info`;
2. `memory_needs` is arithmetic only, an upper bound, of reading the weights, too: the server is
   refused at start by it, and `tools.sizing` plans with it on machines without the device;
3. `device_memory` asks the device for its free memory, if its memory is not the host's;
4. `build` allocates everything, reads the weights through `model.checkpoint.weights.load_weights`,
   compiles all that steps need, and records the usual ones: the first request does not wait for it.

Its `Backend`

1. `prepare` turns a batch into its inputs and sends them, without waiting for the step before;
2. `forward` computes the logits of `TorchBackend` up to rounding: tests/inference_svc/backends/
   compares them over mixed batches, with adapters and without;
3. `free_unused` is called when either has run out of memory; then it is asked for a part of the
   step: a step that was given up leaves nothing behind that a later one could trip over;
4. `lora_launches` counts the operations that a step launches for an adapter:
   tests/inference_svc/backends/test_lora_launches.py compares it with real launches;
5. makes residency changes through `adapter_memory.AdapterMemory`, or a memory of its own;
6. changes nothing but the pages that the batch's rows own and the tensors that `prepare` returned:
   `adapters.residency` decides on the contents of the adapters' memory.

A device's name for users is a value of `--device` in `config`, and its kernels lie under
`kernels/`; nothing else in the tree may test for it.
"""

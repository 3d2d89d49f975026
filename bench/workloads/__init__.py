"""Callers' workloads against whole services.

adapter_kinds      compares the cost of each kind of adapter with plain ones
alora              measures the time that an activated LoRA (aLoRA) saves as second adapter over one
                   long context
attackers          hostile callers over gRPC and HTTP, each in an endless loop
attacks            measures `GetAdapter` and `Generate` of one tenant during attacks of another
                   tenant, or of a caller without a token
interference       W3: decodes 16 requests while the server pulls adapters
large_adapter      W3 with one adapter of 1.5 GB: sixteen requests decode while it is loaded
layerwise_prefill  measures the maximum gain of a prefill that starts on layer 0 while later layers
                   still arrive
many_adapters      W4: more adapters than memory holds, by the S-LoRA generator of requests
prefix_cache       W5: measures the prefill that the prefix cache saves
pushes             W6: the time from a trainer's push to the last replica's first new token
real_model         SmolLM2-135M-Instruct, its trained adapters, and prompts that people could send
throughput         W1: measures tokens per second, ours and the peers'
trace              the S-LoRA generator of requests
ttft               W2: measures the time to the first token
updates            times a trainer's update of one adapter, from `register` to the first token of
                   the new version
"""

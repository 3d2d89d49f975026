"""The engine: schedules, computes and settles one batch per step; driven by messages.

engine         one step: take messages, schedule, run, settle
messages       the picklable messages between front end and engine
scheduler      which sequences run in the next step
fair_queue     all waiting sequences, fair among tenants
siblings       sequences that wait for another one to compute their prompt
tenant_queue   one tenant's waiting sequences: priorities, adapters, aged requests
round_robin    deficit round robin
places         which sequences give up their places for tenants that have none
grants         how many tokens of each running sequence a step computes
prices         the costs of choosing and scoring tokens
admission      which requests are refused before they wait, and when to retry
throughput     recent rates, which admission predicts waits from
expiries       timeouts of sequences
pages          pages of keys and values, and the prefix cache
step_limit     how many tokens are computed at once: fewer where memory ran out
routed_pages   the experts that tokens have chosen, beside the pages
runner         turns a batch into tokens
sampler        chooses tokens from logits
scorer         the log probabilities of a prompt's tokens
penalties      penalties and bans on logits
losses         requests that end because they cannot be computed
settle         accounts for a step: appends tokens, publishes pages, ends sequences
moves          requests that go on with a newer version of their adapter
commands       commands of operators
life_cycle     pauses generation, and gives memory back while the engine sleeps
build          makes an engine from its config
memory_budget  the engine's use of each memory, and whether it fits
memory_fit     the sizes that settings leave open, chosen for a device
thread         runs the engine in a thread
process        runs the engine in a process of its own
process_main   the main program of that process
status         a snapshot for metrics and operators
status_types   the types of that snapshot and of the details
inspect        the details of sequences, images and loads
step_times     how long steps and their phases take
profiler       traces of steps, by torch's profiler
"""

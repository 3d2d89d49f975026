"""Decides which sequences a step computes, in plain Python without tensors.

scheduler       which sequences run in the next step
fair_queue      all waiting sequences, fair among tenants
siblings        sequences that wait for another one to compute their prompt
tenant_queue    one tenant's waiting sequences: priorities, adapters, aged requests
round_robin     deficit round robin
preemption      which sequences give up their places for tenants that have none
step_budget     how many tokens of each running sequence a step computes
prices          the costs of choosing and scoring tokens
admission       which requests are refused before they wait, and when to retry
throughput      recent rates, which admission predicts waits from
expiries        timeouts of sequences, and their waits for adapters
states          the state of sequences, such as pages, and the prefix cache
pictures        which pictures' embeddings are computed and kept
memory_backoff  how many tokens are computed at once: fewer where memory ran out
settle          accounts for a step: appends tokens, settles state, ends sequences
version_moves   requests that go on with a newer version of their adapter
"""

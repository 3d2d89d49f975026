"""Computes a batch: runs it, chooses tokens, and measures it.

routed_pages  the experts that tokens have chosen, beside the pages
runner        turns a batch into tokens
sampler       chooses tokens from logits
scorer        results of a prompt's tokens: log probabilities, and sums of hidden states
penalties     penalties and bans on logits
losses        requests that end because they cannot be computed
step_times    how long steps and their phases take
profiler      traces of steps, by torch's profiler
"""

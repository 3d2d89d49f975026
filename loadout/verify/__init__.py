"""`loadout verify`: proves that a served adapter is the one that was trained.

prompts    the prompts to ask
served     the service's greedy answers, with log probabilities
reference  the same log probabilities by transformers and PEFT
compare    whether both are equal, up to rounding in the service's dtype
run        the steps of `loadout verify`, in order
"""

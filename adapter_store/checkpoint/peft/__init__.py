"""PEFT's config and its names of tensors, and which modules they mean.

config_values    values of an adapter's config, each of its type and within bounds
config           an adapter's config as one typed, checked object; PEFT's parsed
experts          A and B of all experts of a mixture, as trainers stack them
parameters       A and B of bare parameters, as PEFT saves experts' ones
tensor_keys      the names of PEFT's tensors
towers           modules of other towers and families, which no server computes
extras           the contents besides A and B that a PEFT config announces
fields           a verdict on every field of PEFT's LoraConfig
module_patterns  which modules a config means, by PEFT's rules, within a time budget
"""

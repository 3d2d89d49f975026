"""An adapter's files, read as hostile: every byte is understood, safe and used, or it is refused.

open               opens a checkpoint: runs all the checks below, in order
recently_verified  checkpoints that were just checked, passed on from registration to compilation
features           the features that an adapter uses, by kind
formats            which trainer's format a folder is in, and a reader for each
files              an adapter's files, open to be read, and copies that were changed
memory_files       files of an adapter that lie in memory alone
arriving           hashes and checks tensors while their file arrives
safetensors        the header of a .safetensors file
json               JSON objects with caps and without surprises
tensors            the headers of the tensors, and their pairing into targets
weights            the weights of the modules that an adapter changes, as views of tensors
config_values      values of an adapter's config, each of its type and within bounds
scan               one pass over the weights: hashes, and no value that is not finite
digest             loadout-digest-v1, the identity of an adapter's content
peft_config        an adapter's config as one typed, checked object; PEFT's parsed
experts            A and B of all experts of a mixture, as trainers stack them
parameters         A and B of bare parameters, as PEFT saves experts' ones
replacements       base weights that an adapter has of its own
tensor_keys        the names of PEFT's tensors
towers             modules of other towers and families, which no server computes
peft_extras        the contents besides A and B that a PEFT config announces
peft_fields        a verdict on every field of PEFT's LoraConfig
module_patterns    which modules a config means, by PEFT's rules, within a time budget
base_weights       weights of a base model's folder, read one at a time or compared
strip              a copy of an adapter without base weights
convert            a plain LoRA of an adapter that was trained on a changed base
initial_weights    the initial weights of training on a changed base, read or computed
text_files         the tokenizer and the chat template beside an adapter, read in a child process
child_process      runs a child process that reads hostile files
unpickle           pickled weights, converted to safetensors in a sandboxed child process
"""

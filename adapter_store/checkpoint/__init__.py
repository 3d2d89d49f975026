"""An adapter's files, read as hostile: every byte is understood, safe and used, or it is refused.

conversion    copies of an adapter: as a plain LoRA, or without base weights
peft          PEFT's config and its names of tensors, and which modules they mean
reading       reads the files of an adapter: headers, values and hashes
open          opens a checkpoint: runs all the checks below, in order
features      the features that an adapter uses, by kind
formats       which trainer's format a folder is in, and a reader for each
tensors       the headers of the tensors, and their pairing into targets
weights       the weights of the modules that an adapter changes, as views of tensors
scales        refuses scales of nothing, and warns of values that are too large
replacements  base weights that an adapter has of its own
text_files    the tokenizer and the chat template beside an adapter, read in a child process
unpickle      pickled weights, converted to safetensors in a sandboxed child process
"""

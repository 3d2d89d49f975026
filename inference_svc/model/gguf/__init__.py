"""GGUF files as models: llama.cpp's format, a file with weights, config and tokenizer.

file       a file's header: its metadata, and the places of its tensors
blocks     blocks of quantised weights, as rows of codes with scales
families   the families that are read: names of tensors, and the values that a converter changes
metadata   the values of the model's architecture, of which each has to be known
tensors    the tensors of the model, listed and read
config     config.json and generation_config.json, of the metadata
tokenizer  the tokenizer's files, of the metadata
expand     a folder with all these beside the file, which everything else reads
"""

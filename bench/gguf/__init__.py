"""GGUF files, llama.cpp's format, and llama.cpp on the same files as ours.

files  writes models and LoRA adapters as GGUF files
steps  compares decode steps with llama.cpp's
"""

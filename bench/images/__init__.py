"""Images in prompts, beside transformers and PEFT.

model    a model of SmolVLM's shape that reads images, its adapters, and images
peer     transformers and PEFT, in a process that answers line by line
compare  the first token with an image, tokens per second, and tokens of others beside an image
"""

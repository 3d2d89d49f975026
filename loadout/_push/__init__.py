"""Sends an adapter from a trainer's memory.

tensors      tensors of torch and numpy as the bytes of a .safetensors file, one at a time
adapter      names and shapes of an adapter's tensors, and its config, checked before they are sent
sharded      tensors that are sharded over the ranks of a training run: all take part, one sends
result       the result of a push
upload       a push as the messages of UploadAdapter
async_push   a push from its tensors to the replicas that can sample from it
push         the same for the blocking client, generated
"""

"""The base model: its shapes, its weights, and one decoder for the Llama family.

architectures      The supported architectures, one row each, and the keys of their config.json.
generation_config  What generation_config.json says: end tokens, defaults of sampling.
geometry           The shapes and constants of a decoder, from config.json.
rope               Rotary position embedding: its parameters, and their frequencies.
weights            The safetensors of a model directory, read into the decoder's buffers.
decoder            The decoder in torch.
layers             The decoder's parts: linear, norm, rotary embedding, activation.
inputs             A batch as the tensors of one step.
lora               The Protocol by which adapters enter the decoder.
"""

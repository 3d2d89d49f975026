"""The base model: its shapes, its weights, and one decoder for the Llama family.

hub                A model by its name on the Hugging Face Hub: found in its cache, or downloaded.
files              The files that a model's folder has to have, checked before any is loaded.
architectures      The supported architectures, one row each, and the keys of their config.json.
generation_config  What generation_config.json says: end tokens, defaults of sampling.
geometry           The shapes and constants of a decoder, from config.json.
rope               Rotary position embedding: its parameters, and their frequencies.
weights            The safetensors of a model directory, read into the decoder's buffers.
base_hashes        What the checkpoint has of what trainers save along, hashed for the store.
decoder            The decoder in torch.
layers             The decoder's parts: linear, norm, rotary embedding, activation.
inputs             A batch as the tensors of one step.
lora               The Protocol by which adapters enter the decoder.
"""

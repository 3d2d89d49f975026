"""The base model: described as data, its weights, and the decoder that computes it in torch.

checkpoint     a model's folder: its files, its tensors, and the decoder's weights
gguf           GGUF files as models.
architectures  The families of models: one module each.
description    A decoder as data: its maths and its shapes.
quantised      The formats in which checkpoints have weights in few bits, a module each.
mixers         Mixers with a recurrent state, a module each.
encoder        The operations of encoders, and torch's definition of them.
sharding       A model over several ranks.
features       The features of a decoder that a backend must compute, by name.
config         config.json: its keys, and its values.
building       Parts of descriptions that most families have in common.
rope           Rotary position embedding: its parameters, and their frequencies.
operations     The operations of a step, as data.
walk           The one walk over a description, which lists a step's operations.
lifetimes      When a step's values are needed, and the memory that they take.
tower          Vision towers, which compute in units, and the ones in torch.
transformer    The decoder in torch: executes a step's operations.
step           A step that torch is computing.
layers         The decoder's parts that hold something: linear layers, frequencies.
kv_caches      The keys and values of a decoder's layers, a cache for each of their shapes.
recurrent_states  The memory of recurrent states, which mixers read and write by slot.
inputs         A batch as the tensors of one step.
lora           The Protocol by which adapters enter the decoder.
"""

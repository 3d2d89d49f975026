"""Small models, adapters and tokenizers, and the oracle's logits.

decoders         our decoders, run over sequences in any chunks
decayed_sum      a toy of a mixer with a recurrent state, and a model that has it
encoders         models that embed and classify, of every family of encoders
families         the configuration of every family, with its special features switched on
parity           records an engine's logits, and compares them with an oracle's
templates        chat templates that never end, or do more than templates may
quantised        decoders and zoos in few bits, and the weights to compare them with
saved_weights    weights in few bits as libraries save them, and packers
smollm2          SmolLM2 with trained adapters, and the answers of transformers and PEFT
tokenizer_files  folders of tokenizers with tokens added to them
tokenizers       tiny tokenizers of the kinds that models bring
trained          folders with adapters as trainers save them
whole_models     models of several towers, as transformers makes them
zoo              random models with PEFT adapters: on disk, and in memory as the oracle
"""

"""A model's folder: its files, its tensors, and the decoder's weights.

hub                A model by its name on the Hugging Face Hub: found in its cache, or downloaded.
files              The files that a model's folder has to have, checked before any is loaded.
generation_config  The contents of generation_config.json: end tokens, defaults of sampling.
embedding_files    The names of the files of sentence-transformers.
dense              A dense layer behind a model's pooling.
sentence_transformers  How a model embeds, by the files of sentence-transformers.
classifier         The head of a model that classifies.
parameters         Which tensors of a checkpoint a decoder has, and where each goes.
parts              Which part of a tensor a rank has.
tensors            The tensors of a folder: found, compared with the decoder's, and read.
weights            The safetensors of a model directory, read into the decoder's buffers.
wrapper            The names in a whole checkpoint, of which the text part is served.
headers            The tensors of a checkpoint by its files' headers, other towers' among them.
base_hashes        Hashes, for the store, of base weights that trainers save with adapters.
"""

"""The meaning of what the client and the services exchange. Imports none of them, and no torch.

adapter_files      the files that make up an adapter, and the most bytes of each
side_files         a verdict on every other file: refuses files that would change the result
folders            reads a folder that may come from a stranger
tensor_names       the names of an adapter's tensors, without the parts of torch's wrappers
tokenizer_extract  the parts of a tokenizer that decide the tokens of a text, to be compared
base_model_names   which base model an adapter's config may mean
images             layouts and images: kinds, types, targets, headers, and their rules
protobuf           reads and writes the messages of layouts and images
words              lists of names in messages for people
"""

"""The meaning of what the client and the services exchange. Imports none of them, and no torch.

adapter_files  the files that make up an adapter, and the most bytes of each
folders        reads a folder that may come from a stranger
tensor_names   the names of an adapter's tensors, without the parts of torch's wrappers
side_files     a verdict on every other file: refuses files that would change the result
images         layouts and images: kinds, types, targets, headers, and their rules
protobuf       reads and writes the messages of layouts and images
words          lists of names in messages for people
"""

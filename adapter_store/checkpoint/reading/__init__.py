"""Reads the files of an adapter: headers, values and hashes.

recently_verified  checkpoints that were just checked, passed on from registration to compilation
files              an adapter's files, open to be read, and copies that were changed
memory_files       files of an adapter that lie in memory alone
arriving           hashes and checks tensors while their file arrives
safetensors        the header of a .safetensors file
json               JSON objects with caps and without surprises
scan               one pass over the weights: hashes, and no value that is not finite
digest             loadout-digest-v1, the identity of an adapter's content
"""

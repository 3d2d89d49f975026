"""config.json of a model.

keys    the treatment of every key
reader  values; every complaint names the key
"""

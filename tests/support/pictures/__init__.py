"""Models that read pictures, and pictures for them.

models    small models that read pictures, with the files of their processors
contents  adapters of their towers with contents besides A and B
files     pictures as files, of every form that callers send
"""

"""Models that read pictures, and pictures for them.

models      small models that read pictures, with the files of their processors
templates   their chat templates, and tokenizers with the tokens of pictures
processors  the processors of transformers that need torchvision
contents    adapters of their towers with contents besides A and B
towers      towers of both backends of CPUs, of a model's folder
files       pictures as files, of every form that callers send
"""

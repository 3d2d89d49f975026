"""Vision towers: parts of the models that read pictures.

vit  CLIP and SigLIP
"""

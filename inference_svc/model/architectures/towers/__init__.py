"""Vision towers: parts of the models that read pictures.

vit      CLIP and SigLIP
qwen     Qwen 2 VL and its successors
pixtral  Pixtral, of Mistral 3
gemma4   Gemma 4
making   makes the description of a tower
axial    the rotation by rows and columns of the last three
"""

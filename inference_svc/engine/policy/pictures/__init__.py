"""Which pictures' embeddings are computed and kept.

memory  their memory, and the work for them in each step
"""

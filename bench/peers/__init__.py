"""Sets up the other servers that ours is compared with.

install  sets up the peers, each in its own environment under `.bench/`
"""

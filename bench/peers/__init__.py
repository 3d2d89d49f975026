"""Sets up the other servers that ours is compared with."""

"""The other servers that ours is measured against, and how they are set up."""

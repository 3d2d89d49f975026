"""The adapter store by itself."""

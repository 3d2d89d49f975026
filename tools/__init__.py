"""Generates what is written from the code, and runs what tests and previews need; not shipped."""

"""Generates documents from the code, and runs programs for tests and previews; not shipped."""

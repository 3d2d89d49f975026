"""Integrations of other engines: with the engines' interfaces stood in for, over a real store."""

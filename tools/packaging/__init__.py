"""Versions, wheels and bills of materials."""

"""Generates documents from the code, and runs programs for tests and previews; not shipped.

packaging  versions, wheels and bills of materials
pages      generates pages of the documentation from the code
"""

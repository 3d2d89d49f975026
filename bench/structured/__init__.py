"""Structured answers: the cost of masks, and of grammar engines.

cost     a decode step of requests with a form of the answer against one without
engines  llguidance against xgrammar: compile times, masks, memory, hostile schemas
"""

"""Serving gRPC.

status  errors as gRPC statuses
"""

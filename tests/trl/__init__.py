"""Clients of others, as they are published, against real services: `make test-trl`."""

"""Programs of others, as they are published, with real services and our checkpoints:
`make test-trl`."""

"""The operations, each with its plain definition beside the fast ones."""

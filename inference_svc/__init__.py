"""Service 2: runs one base model with any mix of its adapters."""

"""Service 1: fetches, validates, compiles and streams adapters."""

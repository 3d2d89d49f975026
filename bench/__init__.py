"""Benchmarks, and the peers that they compare with. The product never imports this package."""

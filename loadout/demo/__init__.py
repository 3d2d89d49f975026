"""The demo: a small trained model, eight adapters that each do one visible job, and the run that serves them."""

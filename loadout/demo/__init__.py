"""The demo: a small trained model, and adapters that each do one visible job."""

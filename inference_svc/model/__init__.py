"""The base model: its geometry, its weights, and one decoder for the Llama family."""

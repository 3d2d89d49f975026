"""The HTTP front, in OpenAI's words: one more way into `service`, and the only place that knows
HTTP. It knows nothing of gRPC."""

"""The engine as coroutines on the event loop.

async_engine   requests and the drain, over the engine's messages
engine_calls   calls of the engine that wait for its replies: load, pin, pause, describe
output_stream  the text of one running request, as deltas
watchdog       checks that the engine still answers
"""

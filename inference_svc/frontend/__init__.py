"""The engine as coroutines on the event loop.

async_engine   requests, commands and the drain, over the engine's messages
output_stream  the text of one running request, as deltas
watchdog       checks that the engine still answers
"""

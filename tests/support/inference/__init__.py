"""The inference service in parts that tests control.

async_engines   the front end's engine over any engine, and requests to it
connections     bare connections to a server's HTTP address
fake_engine     an engine without a model
front           a server's HTTP API, by OpenAI's client and a raw one
gguf_files      GGUF files as llama.cpp's converter writes them, and their weights
loop            a residency without an engine, and one of two adapters without memory
memory_store    images of a small layout, and a store in memory that can misbehave
ranks           ranks of one process, a thread each
results         the results that requests ask for
scrapes         how many series a scrape may have
scripted_pulls  pulls of messages that a test writes
serving         a running server over a fake engine, and a client of it
stepped         an engine on torch's backend, stepped by hand
world           an engine without tensors and threads
"""

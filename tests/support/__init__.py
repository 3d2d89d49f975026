"""What tests are made of, once.

clock         a clock that stands until a test moves it
forked_store  the adapter store as a process that starts at once
hub_server    a server that speaks the Hugging Face Hub's API
native        which variants of the native kernels this machine can run
otlp          an OTLP receiver, and traces as outlines
postgres      a real PostgreSQL server for the session
processes     marks tests that start processes, and stops others from doing so
wait          waits for what others do in their own time
"""

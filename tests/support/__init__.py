"""What tests are made of, once.

clock         a clock that stands until a test moves it
forks         services and engines as processes that start at once
hub_cache     the cache of Hugging Face's client, in which files are links
hub_server    a server that speaks the Hugging Face Hub's API
native        which variants of the native kernels this machine can run
otlp          an OTLP receiver, and traces as outlines
postgres      a real PostgreSQL server for the session
processes     marks tests that start processes, and stops others from doing so
small_volume  a file system of a few MiB, which can really be full
wait          waits for what others do in their own time
"""

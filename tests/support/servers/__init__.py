"""Servers that our services call, and calls that no library would make.

dripping    an S3 service that never ends an answer
http2       HTTP/2 by hand, such as messages of which half is sent
hub_cache   the cache of Hugging Face's client, in which files are links
hub_server  a server that speaks the Hugging Face Hub's API
image_host  a host of images over TLS, whose answers tests write byte by byte
links       a second machine behind a link that can be cut
otlp        an OTLP receiver, and traces as outlines
postgres    a real PostgreSQL server for the session
"""

"""What docs/security.md says of each field and table: what it holds, for how long, for whom, what
bounds it before it is read, and the tests that show it.

`tools.bounds_docs` renders it; a test fails for a field or a table that has no line here, and for a
line of one that there is no more.

line       one line of a table, and words that many have
store      the store's fields, and the catalog's tables
inference  the inference service's fields, over gRPC and HTTP, and what it reads of the store
"""

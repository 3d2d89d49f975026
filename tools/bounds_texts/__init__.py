"""The rows of docs/limits.md for each field and table: its content, how long it is kept, for whom
it counts, the limits that apply before it is read, and the tests of these limits.

`tools.pages.bounds_docs` renders them; a test fails for a field or a table without a line here, and
for a line of a field or table that no longer exists.

line       one line of a table, and phrases that many lines share
store      the store's fields, and the catalog's tables
inference  the inference service's fields, over gRPC and HTTP, and the store's answers that it reads
"""

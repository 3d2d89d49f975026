"""/v1/responses without a store of its own: each request has its whole history.

body    its fields, as a chat and its options
items   the items of an answer, whole or as events
route   a request, from its body to its answer
"""

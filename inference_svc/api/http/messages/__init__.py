"""/v1/messages, by Anthropic's names: a chat of blocks. It is stateless, as the original is.

blocks  the blocks of a request's messages, as a conversation
body    its other fields, as a chat and its options
answer  the blocks of an answer, whole or as events
route   a request, from its body to its answer; and the count of its tokens
"""

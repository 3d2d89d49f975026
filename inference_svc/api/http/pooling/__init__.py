"""Routes that pool prompts instead of generating from them.

embeddings  /v1/embeddings, as OpenAI has it
"""

"""Routes that pool prompts instead of generating from them.

route       the flow that they share: read a body, start its requests, answer with all results
embeddings  /v1/embeddings, as OpenAI has it
scores      /v1/score and /v1/rerank, as vLLM has them
classes     /classify, as vLLM has it
"""

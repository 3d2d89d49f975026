"""Routes that pool prompts instead of generating from them.

route       the flow that they share: read a body, start its requests, answer with all results
inputs      the inputs of bodies that embed and classify, and the bytes of answers to them
embeddings  /v1/embeddings, as OpenAI has it
scores      /v1/score and /v1/rerank, as vLLM has them
pooling     /classify and /pooling, as vLLM has them
tei         /embed, /embed_all, /predict, /similarity and /info of text-embeddings-inference
"""

"""The HTTP API, compatible with OpenAI's: the only package that knows HTTP, and none of gRPC.

serving          serves the application: uvicorn, connections, and the checks before a route
app              the application: routes, error handlers, middleware
errors           errors as responses in OpenAI's format
request          request bodies and headers: reads and checks them
generation_body  the fields that bodies of the generating routes share
generate         the flow of the generating routes: read a request, start it, respond
completions      /v1/completions: body and format
chat             /v1/chat/completions: body and format
responses        /v1/responses, from the body to the answer
messages         /v1/messages, by Anthropic's names
tokens           /inference/v1/generate: body and format
pooling          /v1/embeddings, /v1/score, /v1/rerank and others, as vLLM and TEI have them
tokenizer        /tokenize, /detokenize and /version
response         their responses, full or as events: choices, usage, chunks
results          the results that come beside tokens: fields of a body, parts of an answer
sse              sends server-sent events
models           /v1/models
adapters         /v1/load_lora_adapter and /v1/unload_lora_adapter
life_cycle       /pause, /resume, /sleep, /wake_up, and whether they were called
trainers         /server_info and other routes that trainers call
"""

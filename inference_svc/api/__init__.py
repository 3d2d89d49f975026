"""The API: use cases, and the transports that call them.

service          the use cases, the same for every transport
server_facts     the facts of a server that never change
access           who may call: authorises callers, and audits their changes
residents        operators' use cases of adapters: load, unload, pin, list, inspect
life_cycle       operators' calls that stop and start all generation
generate_call    a call to generate: its fields, their checks, its engine requests
tools            tools of a request, and the readers of its answers
thoughts         thoughts of answers: the form after them, and a bound on their tokens
pictures         pictures of calls: uploaded, decoded, and held while requests are open
generate_stream  runs the requests of a call, and merges their deltas
pooling          calls that pool inputs: embed, score, classify
followers        requests that follow their adapter's name to newer versions
request_record   one record per request: metrics, log line and trace
request_trace    the spans of one request
load_report      the load and the refusal reason, as response headers
grpc             InferenceService over gRPC
http             the API compatible with OpenAI's
"""

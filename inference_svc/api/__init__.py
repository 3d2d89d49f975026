"""The API: use cases, and the transports that call them.

service          the use cases, the same for every transport
generate_call    a call to generate: its fields, their checks, its engine requests
generate_stream  runs the requests of a call, and merges their deltas
followers        requests that follow their adapter's name to newer versions
request_record   one record per request: metrics, log line and trace
request_trace    the spans of one request
load_report      the load and the refusal reason, as response headers
grpc             InferenceService over gRPC
http             the API compatible with OpenAI's
"""

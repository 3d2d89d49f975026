"""InferenceService over gRPC.

servicer  convert, call the service, convert
bounds    limits of each RPC's request
prompts   prompts of every form to our types
convert   protobuf messages to our types and back
uploads   uploads of images as streams of messages
pooling   Embed, Score and Classify: messages to calls, results to responses
results   the results that come beside tokens: options of a request, parts of an answer
"""

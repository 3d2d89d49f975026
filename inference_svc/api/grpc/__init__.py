"""InferenceService over gRPC.

servicer  convert, call the service, convert
bounds    what a request of each RPC may hold
convert   protobuf messages to our types and back
"""

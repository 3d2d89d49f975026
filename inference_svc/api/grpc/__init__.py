"""InferenceService over gRPC.

servicer  convert, call the service, convert
convert   protobuf messages to our types and back
"""

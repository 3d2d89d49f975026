"""How the clients call the services: what goes over a channel, and what comes back.

calls    one function per RPC: its request, its conversion, whether it may be repeated
convert  the contract's messages to the client's types
status   gRPC's errors to the client's
stream   the responses of a streaming RPC, as iterators that retry where it is safe
channel  the channels to both services, and the route of each call
tracing  calls as OpenTelemetry spans
"""

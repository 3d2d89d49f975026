"""How the clients call the services: requests, responses and errors.

calls         one function per RPC: its request, its conversion, whether it may be repeated
convert       the contract's messages to the client's types
server_info   the types that describe an inference server
results       results that come beside tokens: read from a response, and joined
arrays        results as arrays: the server's bytes, without a copy
status        gRPC's errors to the client's
unreachable   explains why a service cannot be reached
channel       the channels to both services, and the route of each call
route         one call's way to a service, over all of its attempts
async_caller  how the client makes calls: channels, attempts, each of several replicas
caller        the same for the blocking client, generated
async_stream  the responses of a streaming RPC, as an iterator that retries where it is safe
stream        the same for the blocking client, generated
tasks         functions of the asyncio client: await, run tasks
threads       the same names for the blocking client: wait, run threads
tracing       calls as OpenTelemetry spans
"""

"""How the clients call the services: what goes over a channel, and what comes back.

calls         one function per RPC: its request, its conversion, whether it may be repeated
convert       the contract's messages to the client's types
server_info   what an inference server says of itself
arrays        the client's types of arrays: bytes as the server has sent them
status        gRPC's errors to the client's
unreachable   why a service cannot be reached, and what to do
channel       the channels to both services, and the route of each call
route         one call's way to a service, over all of its attempts
async_caller  how the client makes calls: channels, attempts, each of several replicas
caller        the same for the blocking client, generated
async_stream  the responses of a streaming RPC, as an iterator that retries where it is safe
stream        the same for the blocking client, generated
tasks         what only the asyncio client does: await, run tasks
threads       the same names for the blocking client: wait, run threads
tracing       calls as OpenTelemetry spans
"""

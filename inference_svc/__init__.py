"""Service 2, inference: runs one base model with any mix of its adapters.

__main__       the command: reads the settings and runs the server until SIGTERM
app            reads the model, decides settings, makes engine and server, serves until a signal
server         the running server: starts the parts in order, serves, drains, closes
config         the settings
auto_settings  decides settings that are left open, for a model on this machine
core           plain data that every module shares: requests, sequences, batches
grammars       the form that an answer must have, and masks that enforce it
results        the results that a request can ask for beside its tokens
pictures       pictures in prompts: from a caller's bytes to tiles
errors         the errors that a caller can get, each with its reason
debug          the debug bundle of a running server
api            the use cases, and their two transports: gRPC and OpenAI's HTTP API
metrics        the Prometheus metrics
frontend       the engine as coroutines: submit, stream, watch
engine         schedule, run, settle: the loop, its queues, its process
backends       how a step is computed on a kind of device
store          the client of the adapter store: names, replicas, pulls
adapters       which adapters are resident, where their bytes lie, and how they get there
model          the decoder: architectures, decoder, weights, layers
text           prompts to tokens, and tokens to text
host           this machine: memory, processors, devices
"""

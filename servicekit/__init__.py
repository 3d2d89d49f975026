"""The parts common to our gRPC services. Knows neither service, and imports no torch.

auth               callers, their rights, and the audit of their changes
errors             the general kinds of errors, from which services derive their own
heap               bounds the arenas of the C heap, and gives back what is free
hub_client         keeps clients of the Hugging Face Hub to hosts that they may go to
interpreter_gc     Python's garbage collector around a service's start
pace               the least pace of a transfer
refs               references to adapters: `[tenant/]name[@version]` or a digest
rpc                serving gRPC
sandbox            limited processes that handle strangers' bytes
shared_memory      memory that processes share, of sealed size
shares             shares of tenants in limited resources, and threads that tenants share
settings           how settings are declared, read and shown; the settings of all services
telemetry          logs, redaction, traces, metrics, recent errors and the debug bundle
work_budget        a tenant's processor time for large or refused requests, lists and images
"""

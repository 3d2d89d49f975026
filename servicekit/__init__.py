"""What any of our gRPC services is made of. Knows neither service, and imports no torch.

auth               callers, their rights, and the audit of their changes
errors             what can go wrong: the general kinds, which services derive their own from
heap               bounds the arenas of the C heap, and gives back what is free
hub_client         keeps clients of the Hugging Face Hub to hosts that they may go to
interpreter_gc     Python's garbage collector around a service's start
refs               what names an adapter: `[tenant/]name[@version]` or a digest
rpc                serving gRPC
shares             what one tenant may take of a finite place, and threads that tenants share
settings           how settings are declared, read and shown, and those that all services have
telemetry          logs, redaction, traces, metrics, recent errors and the debug bundle
tokenizer_extract  what of a tokenizer decides how a text becomes tokens, to be compared
work_budget        how much processor time one tenant may take by what is large, refused or a list
"""

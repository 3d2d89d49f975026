"""The gRPC contract: authenticates, converts, calls `service`, converts back.

servicer      the AdapterStoreService, one method per RPC
convert       between the contract's messages and the store's own types
status        errors as gRPC statuses, and the interceptors that answer them
call_context  what is known of the call in progress, for its line in the log
"""

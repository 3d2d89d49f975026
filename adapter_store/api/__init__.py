"""The gRPC contract: authenticates, converts, calls `service`, converts back.

servicer  the AdapterStoreService, one method per RPC
bounds    what a request of each RPC may hold
convert   between the contract's messages and the store's own types
"""

"""The gRPC contract: authenticates, converts, calls `service`, converts back.

servicer       the AdapterStoreService, one method per RPC
bounds         limits of each RPC's request
convert        between the contract's messages and the store's own types
pull_messages  writes the messages of pulls
"""

"""Scripted services for the client, and the values that they answer with.

fleet        several replicas of the inference service, and a client of them
scripted     gRPC servers in this process whose answers the tests script
server_info  a server's report of itself
tensors      the names of an adapter's tensors, and its config, as clients push them
"""

"""Serves the application: uvicorn, connections, and the checks before a route.

server       uvicorn on the service's event loop
connections  limits of connections that are idle or do not read
http1        refuses requests that two readers could understand differently
middleware   counts and traces requests, adds the load
disconnect   cancels work whose client has disconnected
"""

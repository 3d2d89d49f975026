"""The service's metrics, counted where requests end or read at every scrape.

definitions      every metric: name, kind, help and labels
requests         counts requests and calls, and exports all families
engine           the engine's families, from a snapshot that each scrape asks it for
gateway_routing  the families by which gateways route
store            the families of the store's replicas
fault_report     the last scrapes of a server whose device has failed
top_adapters     counts by adapter, with the busiest by name
"""

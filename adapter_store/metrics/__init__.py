"""The store's metrics, counted where work ends or read at every scrape.

definitions  every metric: name, kind, help and labels
metrics      counts calls, registrations, compiles and pulls
"""

"""The store's metrics, counted where work ends or read at every scrape.

definitions  every metric: name, kind, help and labels
registry     the metrics as objects, with which the parts of the store count; counts calls
"""

"""Joint work of replicas that share a catalog.

pin_refresh    updates this replica's pins after changes that other replicas made
lease_renewal  this replica's leases in the catalog, renewed while the process lives
"""

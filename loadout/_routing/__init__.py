"""Which replica of the inference service a call goes to.

metadata   the adapter key and the published load, as headers carry them
addresses  resolves an address: one target, several, or a name with several
replicas   chooses a replica by health and load: policy without transport
fleet      the channels to the replicas, and the health of each
"""

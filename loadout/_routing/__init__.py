"""Which replica of the inference service a call goes to.

metadata   the adapter key and the published load, as headers carry them
addresses  what an address stands for: one target, several, or a name with several
replicas   the choice of a replica, and what is known of each: policy without transport
fleet      the channels to the replicas, and the health of each
"""

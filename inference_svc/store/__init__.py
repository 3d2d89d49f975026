"""The client of the adapter store.

types             the catalog's records, pages, events and protocols, without transport
adapter_resolver  resolves adapter references through the cache and the store
name_cache        caches records by canonical reference, name and digest
superseded        remembers which contents no name points to any more
content_owners    caches which tenants own which content
texts             the tokenizers and chat templates that adapters bring along, by digest
client            catalog calls on the event loop, image pulls in threads
watch             registers the layout, and keeps the directory current with the store's events
replicas          chooses a replica for each call, the failing ones last
replica_monitor   resolves the store's name, and probes ejected replicas
shared_images     images of a store on the same machine, mapped from its memory
channel_pool      opens, shares and closes the channels to the replicas
credentials       this server's token and certificates for the store
convert           converts protobuf messages and statuses to our types and errors
"""

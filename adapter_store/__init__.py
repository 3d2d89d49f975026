"""Service 1, the adapter store: fetches, validates, compiles and streams adapters.

__main__           the command: reads the settings and runs the store until SIGTERM
app                serves a store, and drains it at the end
build              makes the parts of a store, and closes them in order
config             the settings, with their defaults and limits
core               plain data that every module shares: layouts, names, records, events
errors             the errors that a caller can get, each with its reason
service            the use cases, as the transport calls them
store_status       the state of the store, for operators and for Prometheus
garbage_collector  removes contents that no record points to, and images for unused layouts
api                the gRPC contract: messages in, calls to `service`, messages out
debug              the debug bundle of a running store
registration       from a caller's request to a durable record
sources            where adapters come from: folders, S3, the Hugging Face Hub, uploads
checkpoint         an adapter's files, read as hostile and checked byte by byte
images             compiled images: layout, compilation, tiers, streaming
blobs              the adapters' source files by digest, local or shared between replicas
replication        joint work of replicas that share a catalog
catalog            names, versions, events, layouts and image states in a database
metrics            the Prometheus metrics
"""

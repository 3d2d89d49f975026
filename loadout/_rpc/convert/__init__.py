"""The services' messages as the client's types: pure functions, one per message.

from_store      adapters, layouts, events
from_inference  generated tokens, resident adapters, servers; and the debug bundles of both services
"""

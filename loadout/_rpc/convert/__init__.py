"""The services' messages as the client's types: pure functions, one per message.

from_store      adapters, layouts, events
messages        messages made of arguments of any type
to_chat         prompts of every form, and the options of a chat
embedding       inputs to embed, and their vectors and labels; scores
from_inference  generated tokens, resident adapters, servers; and the debug bundles of both services
"""

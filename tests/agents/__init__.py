"""OpenAI's clients and frameworks of agents, as they are published, against real services."""

"""What any of our gRPC services is made of. Knows neither service, and imports no torch.

settings  the settings that all services have, and how settings are read
"""

"""What any of our gRPC services is made of. Knows neither service, and imports no torch."""

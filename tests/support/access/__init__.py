"""Who may call: tokens, policies and certificates.

certificates     a CA and the certificates that it signs
inference_roles  the roles that may call each RPC of the inference service
policies         policy files, and tokens whose text follows from their names
services         both services, as authentication sees them
"""

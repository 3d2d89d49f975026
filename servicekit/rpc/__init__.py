"""Serving gRPC.

server        a gRPC server: rotating TLS, health, reflection, ready file, reload on SIGHUP
interceptor   answers, counts, logs and traces each call; refuses callers without a token; drains
call_context  what is known of the call in progress, for its log line and its span
status        errors as gRPC statuses
tls           certificates, rotated without a restart; where a service may listen without a policy
"""

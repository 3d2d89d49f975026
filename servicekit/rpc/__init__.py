"""Serving gRPC.

server          a gRPC server: rotating TLS, health, reflection, ready file
reload          takes over policy and certificates that change: on SIGHUP, and by watching the files
health          health checks, bounded for callers without a token
interceptor     answers, counts, logs and traces each call; refuses callers without a token; drains
places          resources that calls share: memory, the parsing thread, places per method
call            a call in progress: its part of its account's share; writes its answers
requests        bounds of request messages, and how they are read
wire            counts the entries of a message that is not parsed yet
strangers       bounds connections that have shown no token, and closes any that storm
stranger_calls  notes which connection each call came on, and whether it had a token
sockets         finds the accepted sockets of this process, and resets them
syn_filter      lets new connections of an address wait in the kernel
call_context    facts about the call in progress, for its log line and its span
status          errors as gRPC statuses
tls             certificates, rotated without a restart; where a service may listen without a policy
"""

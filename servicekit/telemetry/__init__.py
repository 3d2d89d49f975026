"""Logs, redaction, traces, metrics, recent errors and the debug bundle of a service.

logs            log lines on standard error, as JSON or as text, written by a thread
redact          hides secrets in text that people will read
spans           spans as plain data, and the current span of a task or thread
tracing         decides whether traces are sent, and makes a gRPC call a span
otlp            sends spans over OTLP; imports OpenTelemetry, loaded on demand
metrics         defines metrics, and the registry that makes and exports them
histogram       durations counted in buckets, cheap enough for every step
place_metrics   metrics of the resources that tenants share, the same for each service
exposition      writes metrics in the text format
metrics_server  serves metrics over HTTP
recent_errors   the calls that failed most recently, by method and reason
stacks          lists where the threads of a process are
debug_bundle    makes the parts of a debug bundle, without secrets
"""

"""Logs, redaction, traces, metrics, recent errors and the debug bundle of a service.

logs    log lines on standard error, as JSON or as text, written by a thread
redact  hides secrets in text that people will read
spans   a trace's spans as plain data, and the current span of a task or thread
"""

"""Processes that handle strangers' bytes: limited by the system, without secrets, and expendable.

A user names its task, a module of its own that the process loads, and its limits. Requests and
answers are frames over pipes. A process that breaks a limit is ended, and its user gets a
SandboxFailure.

process   starts a process for a task, asks it, ends it, and reports how it failed
pool      a few processes of one task, kept for the next request
__main__  the program of the process: it loads the task, then limits itself, then reads requests
"""

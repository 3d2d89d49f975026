"""The processes that run tests.

forked_workers  processes that are forked once all tests are collected
late_grammars   grammars that are read when one is needed
processes       marks tests that start processes, and stops others from doing so
remembered      TLS settings and templates that libraries would make anew each time
root_logs       captures logs at the root logger alone
share           a folder and a process that forks, which the workers of one run share
"""

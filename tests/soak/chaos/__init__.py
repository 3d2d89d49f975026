"""Both services under faults, as Kubernetes would run them: `python -m tests.soak.chaos`.

adapters   what each adapter answers, by another way than the services'
pods       processes that are killed, stopped and started again
tenants    threads that push, update, delete and ask
ledger     everything that happened, and whether any of it may not have
__main__   one run, and its summary
"""

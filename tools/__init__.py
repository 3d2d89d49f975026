"""Generates documents from the code, and runs programs for tests and previews; not shipped.

commit_messages  checks the messages of new commits
conformance      makes the table of support for each kind of content that a trainer may write
durations        shows the durations of a run of the tests, and compares folders with a committed
                 table
history          reads this checkout's history with git
house            measures the architecture from the source alone
prometheus       runs and queries a real Prometheus server
prometheus_rule  writes Prometheus' rules as an object for its operator on Kubernetes
sizing           computes the memory that an inference service needs, and the number of adapters
                 that it holds
sizing_models    the models and cards in the tables of sizing
syntax           reads Python files as syntax trees, for the tools that look for facts, words and
                 imports
unasync          writes the blocking client from the asyncio one
words            counts words that make prose hard to read, by page and by package
bounds_texts     the rows of docs/limits.md for each field and table
containers       builds container images on this machine, on bases made from Debian's packages
dashboards       writes the Grafana dashboards of deploy/grafana from code
mixed_load       runs both services as real processes under a mixed load, which changes all exported
                 metrics
packaging        versions, wheels and bills of materials
pages            generates pages of the documentation from the code
"""

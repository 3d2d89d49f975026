"""Parts that tests share, each of them once.

access          who may call: tokens, policies and certificates
all_tests       the names of all tests
clock           a clock that stands until a test moves it
deploy          the objects that we deploy: manifests, rules, compose files, a real Envoy
durations       properties of each test's report with the seconds of its phases and fixtures
error_kinds     the kinds of errors that there are
examples        how many examples the property tests try
forks           services and engines as processes that start at once
gpu             models, adapters and streams for tests of a device, real or emulated
house           the product's modules by name, and how a rule about them fails
inference       the inference service in parts: engines, stores and servers that tests control
kernels         adapters in an arena, and the process that runs the Triton kernels
loadout         scripted services for the client, and the values that they answer with
logs            the log lines of the code under test
machine         the limits of a machine: volumes, files, threads, memory, installed packages
models          small models, adapters and tokenizers, and the oracle's logits
native          the variants of the native kernels that this machine can run
pairs           the cells of a matrix that `make test` and `make test-unit` run
servers         servers that services call: S3, the Hub, PostgreSQL, OTLP
store           the adapter store, its clients, and adapters for it
up              `loadout up` in a process of its own
wait            waits until other processes, threads and tasks have done their work
pictures        models that read pictures, and pictures for them
workers         the processes that run tests, and what they share
"""

"""The demo: a small trained model, and adapters that each do one visible job.

jobs      the jobs, their words, and which words were never trained on
adapters  which adapter comes from where, and its registration
given     which settings of a service its user gave
system    S3 server, adapter store and inference service as processes
process   one child process: started, watched, ended
traffic   the requests: held-out words for the base and every adapter, mixed
report    the table of results, and the hit rates
run       the steps of `loadout demo`, in order
train     trains the model and the adapters from nothing
s3        an S3 server in a process of its own
chat      `loadout demo --chat`: a real chat model with three adapters
"""

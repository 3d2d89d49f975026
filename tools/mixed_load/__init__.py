"""Both services as real processes under a mixed load, which makes all that they export move.

load       the services, and the threads that put the load on
roles      callers, trainers and operators: what each of them does
base_role  what all roles share: a thread, a random course of actions, calls over HTTP
"""

"""Runs both services as real processes under a mixed load, which changes all exported metrics.

load       the services, and the threads of the load
roles      callers, trainers and operators, with their actions
base_role  the base of all roles: a thread, a random sequence of actions, calls over HTTP
"""

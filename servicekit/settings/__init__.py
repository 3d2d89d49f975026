"""How a service's settings are declared, read and shown.

addresses  addresses of settings, and values as errors show them
types      types of values, with their checks: addresses, sizes, seconds, lists
service    the settings that all services have: a service's class adds its own
load       reads flags, environment and file into a service's class
files      files that settings name, and how their changes are taken over
describe   each setting as the documents show it, and the text of `--help`
ports      checks that a service can listen, before it spends time on anything else
secrets    the environment's secrets, to be redacted
"""

"""Commands that start services, and code of the services that commands run.

demo          demo, up
download      download
quantize      quantize
services      store, serve
token         token
completion    completion of adapter names in a shell
service_code  runs code of the services, for commands that need none of them
"""

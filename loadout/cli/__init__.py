"""The `loadout` command.

local        commands that start services, and code of the services that commands run
server       commands about a running server
adapters     commands about adapters and their files
__main__     runs a command; exit codes
app          the commands, put together
help         the help page of a command
options      options that several commands share
connection   the options for token and TLS, and the clients they make
suggestions  close names and versions for an adapter that is not there
config       variables that commands read
signals      SIGTERM for a command that has started processes
output       tables, JSON, files, and the one line of a failure
"""

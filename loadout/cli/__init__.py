"""The `loadout` command.

__main__        runs a command; exit codes
app             the commands, put together
demo            demo, up
download        download
services        store, serve
adapters        register, adapters
verdicts        which servers can serve an adapter
check           check
engines         treatment of parts of an adapter by other engines, with sources
layouts         layouts
versions        versions, rollback, prune, delete
generate        generate
residents       load, unload, pin, unpin, residents
life_cycle      pause, resume, sleep, wake
inspect         inspect
info            info
top             top: reads both services, again and again
top_overview    the figures of top, from two samples
top_view        how top is drawn
bench           bench
verify          verify
bench_adapters  which adapters bench uses
debug           debug
profile         profile
signing         keygen, digest, sign
strip           strip
convert         convert
tokenizer       lines about a tokenizer that lies beside an adapter
token           token
help            the help page of a command
options         options that several commands share
connection      the options for token and TLS, and the clients they make
suggestions     close names and versions for an adapter that is not there
completion      completion of adapter names in a shell
config          variables that commands read
service_code    runs code of the services, for commands that need none of them
signals         SIGTERM for a command that has started processes
output          tables, JSON, files, and the one line of a failure
"""

"""Commands about adapters and their files.

adapters   register, adapters
verdicts   which servers can serve an adapter
check      check
engines    treatment of parts of an adapter by other engines, with sources
layouts    layouts
versions   versions, rollback, prune, delete
residents  load, unload, pin, unpin, residents
inspect    inspect
verify     verify
signing    keygen, digest, sign
strip      strip
convert    convert
tokenizer  lines about a tokenizer that lies beside an adapter
"""

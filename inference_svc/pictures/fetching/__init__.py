"""Fetches images from hosts that the operator has allowed; none without `--image-hosts`.

Callers choose the URLs, so everything here treats them, the hosts' addresses and the hosts' answers
as an attacker's.

hosts      which URLs there are, and which hosts are allowed
addresses  the addresses of a host, of which some are refused
lookups    the lookups of names, in threads of their own
exchange   one request to one address, and its answer
fetcher    fetches the images of a call, within bounds of time, bytes and number
"""

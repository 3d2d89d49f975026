"""Ranks of several machines, nodes. Node 0 has rank 0, and the others compute for it.

handshake    proves on both sides of a connection that the other knows the nodes' secret
connections  connections whose other end may vanish without a word
messages     what a rank of another node says until it computes
facts        the facts that all nodes must agree on
rendezvous   rank 0's side: waits for the ranks of other nodes
remote       a rank of another node, as rank 0 sees it
main         the main program of a rank of another node, which comes to rank 0
node         the ranks of another node, started and watched
"""

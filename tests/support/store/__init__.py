"""The adapter store, its clients, and adapters for it.

access_calls     every RPC of the store as a caller of some role would call it
adapters         a tiny base model's layout, and PEFT adapters for it
buckets          a bucket that replicas of a store share
cards            the README that PEFT writes beside an adapter, made once
catalogs         short forms for calls of a catalog, and its events
checkpoints      the files of an adapter, changed, and how the store refuses them
client           a client of the store, which shows the contract as a caller sees it
format_2         a layout and checkpoints with every kind of segment of image format 2
images           registers adapters, makes images part by part, and reads pulls
messages         layouts as the messages that a server sends
peft_models      adapters that PEFT trains of tiny models, and their compiled segments
process          the store as a process
served           a running store in this process, over real channels
trained_experts  experts of a mixture in the folders that `trainers/make.py` made
"""

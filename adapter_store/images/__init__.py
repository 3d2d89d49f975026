"""Compiled images: one contiguous range of bytes per adapter and layout, ready to be copied.

tiers          the places that keep images: memory, disk and a shared bucket
plan           what an image holds and where, before a byte is compiled
compile        fills an image from a checkpoint, part by part
builder        makes one image: from the disk tier, the shared tier, or the blob
stored_source  opens the source that an image is made of
partial_image  an image that is being filled while others already read it
pull           streams an image to a caller: header, chunks, layer ends, trailer
share          hands the files of complete images to services on the same machine
precompile     compiles images before they are pulled
worker_pool    threads that run jobs by priority
"""

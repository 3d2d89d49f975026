"""Compiled images: one contiguous range of bytes per adapter and layout, ready to be copied.

layout         gives layouts their identity, and their form in the catalog
announcement   validates announcements, gives them their identity, and finds the ones about an image
fit            which targets of a layout an adapter changes
base_rows      which rows of the base's own weights it changes
sources        the parts of a target's segments
plan           where everything lies in an image, before a byte is compiled
check          a store's and a server's verdict on a folder, without either
compile        fills an image from a checkpoint, part by part
file           an image on disk, which is a valid .safetensors file
builder        makes one image: from the disk tier, the shared tier, or the blob
partial_image  an image that is being filled while others already read it
pull           streams an image to a caller: header, chunks, layer ends, trailer
cache          the tiers together; makes each image at most once at a time
memory_tier    images in memory, evicted by least recent use
disk_tier      images on disk, evicted by least recent use
shared_tier    images in S3 that replicas share, so that only one of them compiles
buffers        buffers for images, and a pool of spare ones
precompile     compiles images before they are pulled
worker_pool    threads that run jobs by priority
"""

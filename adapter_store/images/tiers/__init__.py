"""The places that keep images: memory, disk and a shared bucket.

file         an image on disk, which is a valid .safetensors file
cache        the tiers together; makes each image at most once at a time
memory_tier  images in memory, evicted by least recent use
disk_tier    images on disk, evicted by least recent use
shared_tier  images in S3 that replicas share, so that only one of them compiles
buffers      buffers for images, which may be files that others map, and a pool of spare ones
memory_lock  locks their memory, so that it is never swapped out
"""

"""Blobs: the adapters' source files, immutable, by digest.

local      the Blobs protocol, and blobs in the store's own data folder
shared     blobs in S3 that all replicas of a store share
s3_prefix  the S3 prefix that replicas share, as a few blocking operations
volume     the data folder's file system, and a reserve for when it is full
fsync      files and folders that survive a power cut
"""

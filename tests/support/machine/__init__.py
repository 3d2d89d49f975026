"""The limits of a machine, and machines of other shapes.

fake_machines  machines of any shape, as the files that a system has of them
installed      the packages that the installed ones need
limits         a process that can start no more threads, or open no more files
open_files     the files that a process has open
own_memory     the memory that a process does not share with others
peak_memory    how far the resident memory of a process rises
secret_volume  a folder whose files change as those of a Secret do in a pod
small_volume   a file system of a few MiB, which can really be full
"""

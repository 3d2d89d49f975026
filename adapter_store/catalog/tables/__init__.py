"""The tables of the catalog. Functions take a connection, and are parts of its transaction.

schema         the tables
version_rows   the rows behind a name
name_changes   changes the content of names
lookup         reads names: one adapter, a page, all versions
filters        filters and page tokens of lists
events         the history
base_models    base models that servers have registered, with all their names
layouts        layouts, and which of them are in use
announcements  announcements of a layout's servers
image_states   the state of each image, and who may pull it
work_leases    work that only one replica may do at a time
leftovers      blobs, versions and texts that nothing points to
usage          the use of tenants, against their quotas
"""

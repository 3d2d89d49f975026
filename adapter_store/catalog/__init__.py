"""The catalog: which names exist, what they point to, and everything that ever changed.

catalog        the Catalog class: the transactions around the modules below
schema         the tables
database       SQLite or PostgreSQL: connections and transactions
migrations     brings an older database to the tables of `schema`
changes        changes what names point to
rows           the rows behind a name
lookup         reads names: one adapter, a page, all versions
filters        filters and page tokens of lists
events         the history: one revision per change, in commit order
watch          streams the history to any number of watchers as it grows
follower       receives the events of other replicas' commits
base_models    base models that servers have registered, with all their names
layouts        layouts, and which of them are in use
announcements  what the servers of a layout say beside it
presence       renews that while servers watch, and withdraws it when they have gone
layout_usage   records that layouts are used, while pulls go on
image_states   the state of each image, and who may pull it
work_leases    what only one replica may do at a time
leftovers      blobs, versions and texts that nothing points to
usage          what tenants use, against their quotas
"""

"""The catalog: names, their contents, and the history of all changes.

catalog        the Catalog class: the transactions around the modules below
schema         the tables
database       SQLite or PostgreSQL: connections and transactions
migrations     brings an older database to the tables of `schema`
changes        changes the content of names
rows           the rows behind a name
lookup         reads names: one adapter, a page, all versions
filters        filters and page tokens of lists
events         the history: one revision per change, in commit order
watch          streams the history to any number of watchers as it grows
follower       receives the events of other replicas' commits
base_models    base models that servers have registered, with all their names
layouts        layouts, and which of them are in use
announcements  announcements of a layout's servers
presence       renews these while servers watch, and withdraws them when they have left
layout_usage   records that layouts are used, while pulls go on
image_states   the state of each image, and who may pull it
work_leases    work that only one replica may do at a time
leftovers      blobs, versions and texts that nothing points to
usage          the use of tenants, against their quotas
"""

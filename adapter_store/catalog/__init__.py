"""The catalog: names, their contents, and the history of all changes.

catalog        opens a catalog, and has one object for each use of it:
names          changes of names, and questions about them
layouts        layouts that servers have registered, and which of them are in use
servers        announcements of the servers
images         the state of each image, and who may pull it
blobs          which blobs the records refer to
expiry         the ends of versions
history        the events: one revision per change, in commit order, and their listeners
leases         work that only one replica may do at a time
times          the clock, and the spans that answers depend on
database       SQLite or PostgreSQL: connections and transactions
tables         the tables, and the reads and writes that one transaction is made of
migrations     brings an older database to these tables
follower       receives the events of other replicas' commits
watch          streams the history to any number of watchers as it grows
presence       renews announcements while servers watch, and withdraws them when they have left
layout_usage   records that layouts are used, while pulls go on
"""

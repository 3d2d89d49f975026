"""What an image holds and where, before a byte is compiled.

layout        gives layouts their identity, and their form in the catalog
announcement  validates announcements, gives them their identity, and finds the ones about an image
fit           which targets of a layout an adapter changes
uses          an adapter's changes of one target
ties          changes that follow because the base has one weight in two places
base_rows     which rows of the base's own weights it changes
sources       the parts of a target's segments
plan          where everything lies in an image, before a byte is compiled
scales        the scales of float8 segments, from the values of an adapter
check         a store's and a server's verdict on a folder, without either
"""

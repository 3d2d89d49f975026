"""The store's use cases, as the transport calls them. They know no transport, and never block.

The caller is authorized for the action already; here `caller` decides which tenants' adapters it
sees. Other tenants' adapters appear not to exist.

use_cases    all of them, made for one store
registering  registrations: of sources that are fetched, and of uploads
editing      changes of names that are recorded: delete, prune, rollback, pin
reading      adapters, lists, versions and texts
exporting    the files of a plain LoRA of an adapter, for other engines
watching     the changes of names, while the watcher's announcement is renewed
layouts      layouts: register, list, forget
status       the state of this replica and of the catalog
changes      changes that run: their results, and the images that follow from them
warm_images  images that are there before a request: pinned ones, and all of served layouts
calls        runs functions on the store's threads, each for the account of its caller
"""

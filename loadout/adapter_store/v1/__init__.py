"""Version 1 of the adapter store's contract; the stubs are generated from protos/."""

"""Version 1 of the inference service's contract; the stubs are generated from protos/."""

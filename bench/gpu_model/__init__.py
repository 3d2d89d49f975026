"""A step on a GPU, without a GPU: its launches, bytes and time on the host.

bytes     counts the bytes that the launches of a decode step read and write, and the step's minimum
cost      predicts decode steps on an H200 without a GPU, and compares them with measured steps
host      measures the host's part of a decode step on a GPU, without a GPU
ranks     predicts decode steps of models that several GPUs share, without a GPU
launches  lists the launches of a step on a GPU without one, on torch's `meta` device, whose tensors
          have shapes and no content
step      runs one decode step as on a GPU, of Llama-3-8B's or another shape
time      models the time of a decode step on an H200, from the launches that it makes
"""

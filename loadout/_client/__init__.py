"""The methods of the clients, by service. `loadout.aio` and `loadout.client` join them.

async_store      calls of the adapter store
store            the same for the blocking client, generated
export           receives the files of an adapter
async_inference  calls of the inference service
inference        the same for the blocking client, generated
async_images     uploads of images, and calls that name them
images           the same for the blocking client, generated
async_embedding  calls that pool inputs to vectors, scores and labels
pooled_calls     requests and conversions of these calls
embedding        the same for the blocking client, generated
"""

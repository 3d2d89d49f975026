"""Pictures in prompts: from a caller's bytes to the tiles that a vision tower reads.

They are called pictures here, because an image is an adapter's compiled bytes. Callers and
operators know them as images.

sizes         the sizes of tiles, and their tokens
units         the units that a tower's work for a tile is divided into
processor     how a checkpoint's processor makes tiles of a picture
tiling        makes tiles, in a sandboxed process
task          decodes strangers' files, in that process
uploads       files that requests name by their hashes, within bounds of bytes and time
fetching      fetches files of URLs from hosts that are allowed
decoding      has files decoded, within bounds of bytes, pixels, time and memory
prompt        pictures of a prompt, and the work for them in a step
positions     the positions of tokens, where rows and columns of pictures count
placeholders  the tokens that stand for a picture in a prompt
"""

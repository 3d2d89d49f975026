"""Trainers' formats: which one a folder is in, and a reader for each, which all yield one thing.

select      which format a folder is in, by the names in it; its weight files
readers     the reader of each format, and the content that each trainer writes: a table
mlx         MLX-LM's config and tensors; PEFT's are read by `peft.config` and `tensors`
"""

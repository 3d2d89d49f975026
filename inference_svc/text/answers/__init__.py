"""Reads answers: their text, their thoughts, and their calls of tools.

families    the syntax that a chat template teaches, and answers read by it
syntax      the interface of a syntax, the answer around calls, and thoughts
scanner     text as it comes, and the pieces that are found in it
json_calls  calls as JSON objects, which most families write
forced      calls that an answer has to make, for a grammar engine
hermes      JSON in tags: Qwen 2.5 and 3, Hermes, Granite 4
llama3      an answer that is JSON
mistral     a list of JSON objects, or names and arguments between markers
phi         a list of JSON objects: Phi-4-mini
granite     a list of JSON objects: Granite 3
command_r   a list of JSON objects, with other keys: Command R
tagged      each argument in tags of its own: GLM, Qwen3-Coder and Qwen 3.5
gemma       arguments whose strings stand between markers
harmony     messages to channels: gpt-oss
"""

"""/v1/chat/completions.

endpoint   its body, and the call that it becomes
messages   messages as OpenAI's API and its clients write them
formatter  the format of its choices
"""

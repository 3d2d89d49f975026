"""/v1/chat/completions.

endpoint   its body, and the call that it becomes
messages   messages as OpenAI's API and its clients write them
images     images of conversations, in base64 or as URLs
tools      tools, and calls of them in answers
formatter  the format of its choices
"""

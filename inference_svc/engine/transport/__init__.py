"""Where the engine runs: a thread or a process, and the messages to and from it.

messages      the picklable messages between front end and engine
pixels        the pixels of pictures on their way to the engine's process
thread        runs the engine in a thread
process       runs the engine in a process of its own
process_main  the main program of that process
"""

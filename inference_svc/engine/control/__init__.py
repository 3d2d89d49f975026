"""What operators ask of an engine: commands, sleep, status and details.

commands      commands of operators
life_cycle    pauses generation, and gives memory back while the engine sleeps
status        a snapshot for metrics and operators
status_types  the types of that snapshot and of the details
inspect       the details of sequences, images and loads
"""

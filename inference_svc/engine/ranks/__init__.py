"""A model over several ranks: processes of one machine or of several, which rank 0 leads.

messages  what rank 0 sends to the others, and gets from them, outside of steps
steps     a step as one buffer of numbers
backend   rank 0's backend, which has all ranks compute its steps
peers     another rank, as rank 0 sees it
group     the processes of the other ranks, as rank 0 starts and watches them
liveness  whether a rank still answers, and whether its start goes on
report    reports for operators: memory, the seconds of steps, and where threads are
traces    traces of the steps of another rank, which it makes
pulls     each rank's part of an adapter, pulled together
main      the main program of the other ranks
orphans   ends a rank with the process that started it
nodes     ranks of several machines
"""

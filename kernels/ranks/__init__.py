"""Values that the processes of several ranks exchange within a program, through memory that they
share.

reference  the definition of a sum
memory     the memory, and its faults
native     the operations in C++
"""

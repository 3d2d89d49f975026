"""Values that the processes of several ranks exchange within a program.

reference  the definition of a sum
memory     the memory that ranks of one machine share, and its faults
native     the operations in C++ that exchange through it
called     operations that leave the exchange to a function
"""

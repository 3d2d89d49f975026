"""Operations that vision towers alone have, between their projections.

native     the operations in C++, for programs: each builds its arguments at fixed addresses
reference  the definitions, in torch
"""

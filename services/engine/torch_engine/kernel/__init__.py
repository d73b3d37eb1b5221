"""The exact CPU path: a whole step in C, whose rows are bitwise the same in every batch, chunking, thread count and phase.

`source/` is compiled once a machine (compiler.py) and called through ctypes (library.py); product.h states the contract.
"""

"""Kernels compiled ahead of time for devices that needn't be here, and what came out.

    record    what a launch would compile, taken from the launching code itself, on tensors without memory
    targets   devices, and Triton's compiler for them
    inspect   registers, stack, shared memory and tensor instructions of a compiled kernel
    cases     every kernel at published sizes
    table     docs/kernels.md: figures and budgets, and what a build may not be worse than
"""

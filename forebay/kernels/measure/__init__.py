"""Kernels on the GPU that is here: checked against their definitions, measured beside its ceilings, tuned."""

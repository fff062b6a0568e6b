"""Attention within the segments of packed rows, and masks.

`segment` chooses between `blockwise`, in plain jax, and `splash`, a TPU kernel; neither
makes a mask `[B, T, T]`. `masks` has that, and what losses of packed rows need.
"""

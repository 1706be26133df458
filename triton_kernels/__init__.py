"""Triton kernels and their launchers, installed as ckpt_ops.triton_kernels."""

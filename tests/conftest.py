"""Runs before anything imports Triton; see ``kernels/triton/interpreter.py``."""

from tests.kernels.triton import interpreter

interpreter.switch_on()

"""Gives an existing model this package's modules, and takes them back."""

from .swap import Replaced, replace

__all__ = ["Replaced", "replace"]

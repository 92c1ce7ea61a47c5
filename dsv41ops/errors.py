"""Exceptions of the package; wrong arguments are ``ValueError`` and ``TypeError``."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """A valid call that the backend asked for, or every backend, cannot serve here.

    The message has a line per backend with its reason.
    """

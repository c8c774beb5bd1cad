"""The version of the installed package."""

from importlib.metadata import version

__version__ = version("graft-decoding")

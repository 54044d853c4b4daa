"""The version, written once; packaging reads it from here, and so does a bare source tree."""

__version__ = "0.1.0"

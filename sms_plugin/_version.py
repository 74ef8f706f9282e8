"""The version, read by the build as text: nothing else belongs here."""

__version__ = "0.1.0"

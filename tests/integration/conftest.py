"""The stand-in driver for every test here."""

from tests.support.standin.plugin import standin, standin_directory, standin_here, standin_library

__all__ = ["standin", "standin_directory", "standin_here", "standin_library"]

"""The package version, read from the installed metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("moec")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.1.0"

"""The command line: one file a command. Each parses, calls and prints."""

from hacrl.cli.main import app, main

__all__ = ["app", "main"]

"""The book machine: what a notebook calls, and what runs, checks and publishes notebooks."""
from dit_repro.book.notebook import Run, start

__all__ = ["Run", "start"]

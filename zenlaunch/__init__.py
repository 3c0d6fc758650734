"""zenlaunch: serve LLMs on many-core servers with one pinned engine per part of the machine."""

from __future__ import annotations

__version__ = "0.1.0"

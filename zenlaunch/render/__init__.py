"""Renderers: a plan becomes text files for something that runs it without `zenlaunch up`.

A dict of pure functions. To add one: a module with `render`, and a line in RENDERERS.
"""

from __future__ import annotations

from collections.abc import Callable

from zenlaunch.config import Config
from zenlaunch.plan import Plan
from zenlaunch.render import shell, systemd
from zenlaunch.render.files import RenderedFile, RenderOptions, plan_digest
from zenlaunch.spec import LaunchSpec

Renderer = Callable[[Plan, tuple[LaunchSpec, ...], Config, RenderOptions], tuple[RenderedFile, ...]]

RENDERERS: dict[str, Renderer] = {"systemd": systemd.render, "shell": shell.render}

__all__ = ["RENDERERS", "RenderOptions", "RenderedFile", "Renderer", "plan_digest"]

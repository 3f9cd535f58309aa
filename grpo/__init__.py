"""GRPO for language models, the frozen reference model in a process of its own.

Importing it lets torch's CUDA allocator grow its segments: its own default keeps pieces that the next length does not
fit into. torch reads this when it is loaded, and no program imports torch before it imports a module of this package.
Both names are set: torch up to 2.8 knows the second alone, 2.9 takes this option from the second alone
(pytorch/pytorch#183387), and some versions warn where the first is not there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.api import RefClient as RefClient
    from grpo.api import RunError as RunError
    from grpo.api import SavedRun as SavedRun
    from grpo.api import train as train
    from grpo.config.errors import ConfigError as SettingsError  # noqa: F401

__version__ = "0.2.0"

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
GROWING = "expandable_segments:True"
if not any(name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF") for name in os.environ):
    os.environ |= dict.fromkeys(ALLOCATOR, GROWING)

_PUBLIC = {"train": "api", "SavedRun": "api", "RunError": "api", "RefClient": "api", "SettingsError": "config.errors"}


def __getattr__(name: str) -> Any:
    """Import what `grpo.train` and its like are when they are asked for: `import grpo` takes no time."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'grpo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"grpo.{_PUBLIC[name]}"), {"SettingsError": "ConfigError"}.get(name, name))

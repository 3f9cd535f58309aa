"""GRPO for language models, the frozen reference model in a process of its own.

Importing it lets torch's CUDA allocator grow its segments: its own default keeps pieces that the next length does not
fit into. torch reads this when it is loaded, and no program imports torch before it imports a module of this package.
Both names are set: torch up to 2.8 knows the second alone, 2.9 takes this option from the second alone
(pytorch/pytorch#183387), and some versions warn where the first is not there.
"""

import os

__version__ = "0.2.0"

if not any(name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF") for name in os.environ):
    for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ[_name] = "expandable_segments:True"

"""Hold a run to the memory of a smaller card, by --callback benchmarks/small_card.py:limit."""

import torch

SMALL_CARD = 22.5
"""GiB that torch may hold on a card of 24 GB: the rest has the CUDA context"""

if torch.cuda.is_available():
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(SMALL_CARD * 2**30 / whole)


def limit(**_: object) -> None:
    """Do nothing after a step: importing this file has set the limit."""

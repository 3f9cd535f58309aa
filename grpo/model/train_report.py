"""What `grpo_ref_split.py --dry_run` prints of memory: the formula of train_estimate.py here and for cards as sold."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch

from grpo.model.estimate_report import CARD_USABLE, CARDS, CEILING, GIB, most, name_of, row
from grpo.model.memory import CUDA_PROCESS, CUDA_ROUNDING, MIB, Term
from grpo.model.train_estimate import PHASES, Load, Memory, Policy, memory


def breakdown(policy: Policy, load: Load, others: list[Term], device: torch.device) -> list[str]:
    """A rank of this run, on this machine. `others`: what stands beside the policy."""
    here = needed(policy, load, others, device.type)
    measured = "not measured on a card" if device.type == "cuda" else "held against measured peaks"
    lines = [
        f"Memory of a rank on this machine ({device.type}, {name_of(policy.dtype)}; {measured}), MiB:",
        *(row(term.name, term.size, term.why) for term in here.outside + here.standing),
    ]
    for name, terms in here.phases.items():
        highest = ", the highest" if name == here.highest else ""
        lines += [
            row(name, here.of_phase(name), f"on top of that{highest}:"),
            *(row(f"  {term.name}", term.size, term.why) for term in terms if term.size),
        ]
    lines.append(row("together", here.total, f"with {here.highest}; times {load.ranks} for all ranks"))
    if here.host:
        lines += _in_host(here.host, load.ranks)
    if device.type == "cpu":
        lines.append("  glibc keeps much of what is freed, up to 0.8 times as much again was seen:")
        lines.append("  MALLOC_MMAP_THRESHOLD_=1048576 in the environment makes it give that back.")
    return lines


def _in_host(terms: list[Term], ranks: int) -> list[str]:
    """What is offloaded to this machine's memory, by all ranks that it has, beside what the machine has."""
    together, on_machine = sum(term.size for term in terms), int(os.environ.get("LOCAL_SIZE", ranks))
    needed, there = on_machine * together, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = "it fits" if needed < there else "it does NOT fit: use fewer ranks on a machine, use_peft, or no offload"
    return [
        "",
        "In the machine's memory for each rank (offload_optimizer), MiB:",
        *(row(term.name, term.size, term.why) for term in terms),
        row(
            "together", together, f"times {on_machine} ranks here: {needed / GIB:.1f} of {there / GIB:.1f} GiB: {fits}"
        ),
    ]


def cards(
    policy: Policy,
    load: Load,
    others: list[Term],
    longest: int,
    by_ranks: list[Load],
    instead: dict[str, tuple[Policy, Load]],
) -> list[str]:
    """For each card whether a rank fits, and the one setting that would make it fit, all others as they are.

    `longest`: tokens that the model takes; `by_ranks`: the load with each number of ranks, fewest first; `instead`: by
    the setting's name, another policy and load.
    """
    here = needed(policy, load, others, "cuda")
    lines = [
        f"On a card for each rank (cuda, {name_of(policy.dtype)}): the same formula, held against one run on an H100.",
        f"Together {here.total / GIB:.1f} GiB, {here.held / GIB:.1f} of them always.",
        f"Assumed: {CARD_USABLE:.0%} of a card usable, {CUDA_PROCESS // MIB} MiB of that CUDA's context and kernels; "
        f"the allocator rounds up by {CUDA_ROUNDING:.0%}.",
        "A column is a setting that would do, all others as they are: the largest micro_batch_tokens with which the",
        "update fits, sequences_per_generate with which sampling fits, max_completion_length with which all fits; the",
        "least ranks. '-': this alone does not help.",
    ]
    table = [
        ["card", "fits", "micro_batch_tokens", "sequences_per_generate", "max_completion_length", "ranks", *instead]
    ]
    table += [_card(partial(_fits, others, card), card, policy, load, longest, by_ranks, instead) for card in CARDS]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    return lines + ["  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in table]


def _card(
    fits: Callable[..., bool],
    card: int,
    policy: Policy,
    load: Load,
    longest: int,
    by_ranks: list[Load],
    instead: dict[str, tuple[Policy, Load]],
) -> list[str]:
    """The cells of a card's row."""
    tokens = _largest_update(partial(fits, policy), load)
    groups = most(lambda n: fits(policy, replace(load, rows=n * load.generations), ("sampling",)), load.groups)
    completion = most(lambda n: fits(policy, replace(load, completion=n)), min(CEILING, longest - load.prompt))
    enough = [other.ranks for other in by_ranks if fits(policy, other)]
    return [
        f"{card} GB",
        "yes" if fits(policy, load) else "no",
        f"{tokens:,}" + (" (all)" if tokens == load.share * load.group else "") if tokens else "-",
        f"{groups * load.generations:,}" + (" (all)" if groups == load.groups else "") if groups else "-",
        f"{completion:,}" if completion else "-",
        str(enough[0]) if enough else "-",
        *("yes" if fits(*other) else "-" for other in instead.values()),
    ]


def _fits(others: list[Term], card: int, policy: Policy, load: Load, phases: Collection[str] = PHASES) -> bool:
    """Whether these phases fit a card of `card` GB."""
    needs = needed(policy, load, others, "cuda")
    return needs.process + needs.held + max(map(needs.of_phase, phases)) <= CARD_USABLE * card * GIB


def _largest_update(fits: Callable[..., bool], load: Load) -> int:
    """The largest micro_batch_tokens with which the update fits; 0 where there is none."""
    # All that a rank has needs no sum over several micro-batches, and so may fit where a little less does not.
    whole, update = load.share * load.group, [name for name in PHASES if name != "sampling"]
    if fits(replace(load, micro_batch_tokens=whole), update):
        return whole
    return most(lambda n: fits(replace(load, micro_batch_tokens=n), update), whole)


def needed(policy: Policy, load: Load, others: list[Term], device_type: str) -> Memory:
    here = memory(policy, load, device_type)
    return replace(here, standing=here.standing + others)

"""The tools of the demo with tools: prices and stocks of ninety shops, which nobody else knows. Settings name them by
their file: `--tools demo/shop.py:price demo/shop.py:stock`. A hash draws every number, so that none follows from
another."""

import hashlib

ITEMS = ("lamp", "mug", "rug", "vase", "clock", "chair", "bell", "kite", "drum", "spoon")


def price(item: str, shop: int) -> int:
    """Look up what an item costs in a shop.

    Args:
        item: What is sold, such as lamp.
        shop: The number of the shop, from 10 to 99.
    """
    return draw_number("price", item, shop)


def stock(item: str, shop: int) -> int:
    """Look up how many pieces of an item a shop has left.

    Args:
        item: What is sold, such as lamp.
        shop: The number of the shop, from 10 to 99.
    """
    return draw_number("stock", item, shop)


def draw_number(kind: str, item: str, shop: int) -> int:
    """Return a number from 10 to 99: an even price, or an odd stock, so that the wrong tool is not right by chance.
    Raises LookupError for any other item or shop."""
    if item not in ITEMS:
        raise LookupError(f"no shop sells {item}")
    if not 10 <= shop <= 99:
        raise LookupError(f"there is no shop {shop}")
    digest = hashlib.sha256(f"{kind} of {item} in {shop}".encode()).digest()
    return 10 + 2 * (int.from_bytes(digest[:8], "big") % 45) + (kind == "stock")


def right_call_reward(completions: list[str], call: list[str], **kwargs) -> list[float]:
    """Return 1.0 where the first turn is the right call and nothing else, else 0.0. The demo gives it no weight: it is
    counted, and nobody but the answer teaches the model to call."""
    turns = [completion.split("\n")[0] for completion in completions]
    return [float(turn == right) for turn, right in zip(turns, call, strict=True)]

"""How much memory a sequence takes when it starts: kvpool's way, and the three ways it is measured against.

`on-demand` takes a block when a token needs it. The others reserve, as the systems before paging did (section 6.1 of
arXiv 2309.06180): `max` for the longest sequence there may be, `pow2` for the output's length rounded up to a power of
two, `oracle` for exactly the length that the output will have. They are kinder than those systems were: blocks need not
be contiguous here, so nothing is lost between reservations.
"""

from __future__ import annotations

from typing import Literal

Reservation = Literal["on-demand", "max", "pow2", "oracle"]


def reserved_tokens(policy: Reservation, *, num_prompt_tokens: int, output_tokens: int, max_model_len: int) -> int:
    """Tokens whose blocks are taken at once. `output_tokens`: the output's length, as far as it is known."""
    if policy == "max":
        return max_model_len
    if policy == "pow2":
        return min(max_model_len, num_prompt_tokens + (1 << max(0, output_tokens - 1).bit_length()))
    if policy == "oracle":
        return min(max_model_len, num_prompt_tokens + output_tokens)
    return 0

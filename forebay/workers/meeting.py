"""Where computing from the front and loading from the back should meet.

    0            front                  m                        landed             P
    |  computed  |--- to compute ------>|<------ to load --------|    on the device |
                                        both at the same time

The best `m` makes the longer of the two times shortest. Pure: whoever asks brings the rates and the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GAIN_S, GAIN_SHARE = 0.03, 0.03
"""What a cut must save against loading all, or computing all: less than that isn't worth the trouble."""


GRACE_S = 0.03
"""So late is nobody thought to be late: processes have to wake up."""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """What is still to be loaded, in ascending pieces, the last of which is next to arrive.

    `starts` are their first tokens. `seconds` is what each takes by the rates, one after the other. Together the last
    `asked` pieces have been waited for for `elapsed` seconds; they arrive at once. `landed` is where the part begins
    that needs no loading any more.
    """

    starts: Sequence[int]
    seconds: Sequence[float]
    asked: int
    elapsed: float
    landed: int


def arrivals(outstanding: Outstanding) -> list[float]:
    """When each piece and all behind it will be here, in seconds from now.

    What is overdue is expected to take as long again as it is late, and what follows it to be as slow: so a tier that
    hangs is waited for, but not for ever.
    """
    count = len(outstanding.starts)
    first = count - outstanding.asked
    nominal = sum(outstanding.seconds[first:])
    late = max(0.0, outstanding.elapsed - nominal - GRACE_S)
    left = late if late else max(0.0, nominal - outstanding.elapsed)
    slower = 1.0 + late / nominal if nominal > 0 else 1.0
    times = [left if outstanding.asked else 0.0] * count
    total = times[-1] if count else 0.0
    for piece in range(first - 1, -1, -1):
        total += slower * outstanding.seconds[piece]
        times[piece] = total
    return times


def meeting_point(
    front: int, outstanding: Outstanding, compute_s: Callable[[int, int], float], step_s: float = 0.0
) -> int:
    """The token up to which to compute from `front` on; `front` itself says to wait for what is being loaded.

    It is `landed`, or the start of a piece that isn't behind the front. `step_s` is what a step costs by itself: unless
    all is computed in one go, what follows the prefix takes one more.
    """
    ahead = [piece for piece, start in enumerate(outstanding.starts) if start >= front]
    if not ahead:
        return outstanding.landed
    loads = arrivals(outstanding)
    candidates = [(outstanding.starts[piece], loads[piece]) for piece in ahead] + [(outstanding.landed, 0.0)]
    times = [max(load_s, compute_s(front, at)) + step_s for at, load_s in candidates]
    times[-1] -= step_s
    best = min(range(len(times)), key=times.__getitem__)
    all_loaded, all_computed = times[0], times[-1]
    either = min(all_loaded, all_computed)
    if either - times[best] < max(GAIN_S, GAIN_SHARE * either):
        best = 0 if all_loaded <= all_computed else len(times) - 1
    return candidates[best][0]

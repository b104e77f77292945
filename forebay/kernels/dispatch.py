"""Which form of an operation runs, torch's or our Triton kernel: decided by declared capability, and said aloud.

Configured, eligible and executed are three things, and each is told in the figures:

* *configured*: `FOREBAY_KERNELS` is `torch`, `triton`, or `auto` (the default);
* *eligible*: the kernel can do this device, these dtypes, this size;
* *executed*: how often which form has run.

`auto` takes a kernel that is eligible and has been run and checked on this kind of device; one that has only been
compiled for it is off. `triton` takes every eligible kernel, and where one isn't, that is an error: nothing falls back
silently.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from forebay.errors import ConfigError
from forebay.kernels.gpu import library
from forebay.kernels.scratch import held_bytes
from forebay.kernels.tuning.tables import executed_on

VARIABLE = "FOREBAY_KERNELS"
MODES = ("auto", "torch", "triton")

Form = Literal["torch", "triton"]
Key = tuple[str, torch.device, torch.dtype, torch.dtype, bool]
"""`Facts` as what is looked up once a layer and step."""

Reason = str
"""Why a kernel can't be taken; empty: it can."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Capability:
    """What a kernel can do: dtypes of what is computed, dtypes of what is stored (beside those), the widest row."""

    computed: tuple[torch.dtype, ...]
    stored: tuple[torch.dtype, ...] = ()
    widest: int = 2**31


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
EXACT = (torch.float32,)
CAPABILITIES = {
    "attend": Capability(FLOATS, FP8, widest=256),
    "latent": Capability(FLOATS, FP8, widest=1024),
    "sparse": Capability(FLOATS, widest=1024),
    "index": Capability(EXACT, (*FLOATS, torch.uint8), widest=256),
    "move": Capability((torch.uint8,)),
    "hot": Capability((torch.int64,)),
    "norm": Capability(EXACT, widest=65536),
    "turn": Capability(FLOATS, FP8, widest=1024),
    "activate": Capability(FLOATS),
    "route": Capability(EXACT, widest=4096),
    "experts": Capability(FLOATS, (*FP8, torch.uint8)),
    "choose": Capability(EXACT),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision is about: few in a process, whatever it is asked to do. `wide`: wider than the kernel's rows."""

    operation: str
    device: torch.device
    computed: torch.dtype
    stored: torch.dtype
    wide: bool


class Dispatch:
    """Decisions and their counts; one a process. Callable from any thread."""

    def __init__(self, mode: str = "auto") -> None:
        """Raises ConfigError for a mode that isn't one of `MODES`, or one that can't be."""
        if mode not in MODES:
            raise ConfigError(f"{VARIABLE}={mode!r} must be one of {', '.join(MODES)}")
        if mode == "triton":
            library.require()
        self.mode = mode
        self._lock = threading.Lock()
        self._decided: dict[Key, Form] = {}
        self._eligible: dict[str, bool] = {}
        self._executed: defaultdict[tuple[str, Form], int] = defaultdict(int)

    def choose(self, operation: str, computed: Tensor, stored: Tensor) -> Form:
        """The form that runs now, which is counted. Raises ConfigError where `triton` is asked for and can't be."""
        wide = computed.shape[-1] > CAPABILITIES[operation].widest
        key = (operation, stored.device, computed.dtype, stored.dtype, wide)
        with self._lock:
            form = self._decided.get(key) or self._decide_once(key)
            self._executed[operation, form] += 1
        return form

    def foresee(self, operation: str, computed: torch.dtype, stored: torch.dtype, device: torch.device) -> Form:
        """The form that will run, so that what it needs can be laid out for it. Counts nothing; raises as `choose`."""
        with self._lock:
            key = (operation, device, computed, stored, False)
            return self._decided.get(key) or self._decide_once(key)

    def ran(self, operation: str, form: Form, times: int = 1) -> None:
        """Count what was not for a kernel to decide: a case that the operation's definition leaves to another form."""
        with self._lock:
            self._executed[operation, form] += times

    def _decide_once(self, key: Key) -> Form:
        form = self._decided[key] = self._decide(Facts(*key))
        return form

    def _decide(self, facts: Facts) -> Form:
        reason = why_not(facts)
        self._eligible[facts.operation] = not reason
        if self.mode == "triton" and reason:
            raise ConfigError(f"{VARIABLE}=triton, but {facts.operation} can't: {reason}; `auto` takes torch's form")
        if self.mode == "auto" and not reason and not executed_on(_architecture(facts.device), facts.operation):
            reason = f"it is compiled only for this device, not yet run and checked on it ({VARIABLE}=triton takes it)"
        form: Form = "torch" if self.mode == "torch" or reason else "triton"
        shown = f"; not triton: {reason}" if form == "torch" and self.mode != "torch" else ""
        kinds = f"{facts.computed} over {facts.stored} on {facts.device.type}"
        log.info("kernel %s, %s, %s: %s%s", facts.operation, kinds, self.mode, form, shown)
        return form

    def figures(self) -> dict[str, float]:
        """By dotted name, for every operation: is its kernel configured, was it eligible when last decided, how often
        has each form run. And what gathers keep."""
        with self._lock:
            found: dict[str, float] = {}
            for name in CAPABILITIES:
                found[f"kernels.{name}.triton.configured"] = float(self.mode != "torch")
                found[f"kernels.{name}.triton.eligible"] = float(self._eligible.get(name, False))
                for form in ("triton", "torch"):
                    found[f"kernels.{name}.{form}.executed"] = float(self._executed[name, form])
        found["kernels.scratch.bytes"] = float(held_bytes())
        return found


def why_not(facts: Facts) -> Reason:
    """Why the kernel can't do this, or an empty text."""
    can, kind = CAPABILITIES[facts.operation], facts.device.type
    if kind not in ("cuda", "cpu") or (kind == "cpu" and not library.interpreted()):
        return f"there is no kernel for {kind}"
    if not library.installed():
        return "triton isn't installed (pip install 'forebay[triton]')"
    if facts.computed not in can.computed:
        return f"it doesn't compute in {facts.computed}"
    if facts.stored != facts.computed and facts.stored not in can.stored:
        return f"it computes in {facts.computed}, and can't take {facts.stored} with it"
    if kind == "cpu" and torch.bfloat16 in (facts.computed, facts.stored):
        return "Triton's interpreter computes wrongly in bfloat16"
    if kind == "cpu" and facts.stored == torch.float8_e4m3fnuz:
        return "Triton's interpreter doesn't know float8_e4m3fnuz"
    return f"its rows have {can.widest} values at most" if facts.wide else ""


@cache
def _architecture(device: torch.device) -> str:
    return library.architecture(device)


_present: Dispatch | None = None


def dispatch() -> Dispatch:
    """This process's, made at first use with what `FOREBAY_KERNELS` says then."""
    global _present  # noqa: PLW0603  (one a process, like the devices that it is about)
    if _present is None:
        _present = Dispatch(os.environ.get(VARIABLE, "auto"))
    return _present


def configure(mode: str) -> Dispatch:
    """Start over with another mode and no counts. Raises ConfigError."""
    global _present  # noqa: PLW0603
    _present = Dispatch(mode)
    return _present

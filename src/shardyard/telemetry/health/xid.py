"""XIDs, the errors that NVIDIA's driver tells by number: what each means, and whose fault it is.

Source: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors), as known in 2025.
"""

from dataclasses import dataclass
from typing import Literal

Whose = Literal["program", "device", "either"]


@dataclass(frozen=True)
class Xid:
    """One number."""

    words: str
    whose: Whose
    """Whom it mostly speaks against."""


_KNOWN = {
    8: Xid("a kernel ran longer than the driver waits", "either"),
    13: Xid("a kernel addressed memory that is not its own, or an instruction failed", "program"),
    31: Xid("a page fault: memory was addressed that is not mapped", "program"),
    32: Xid("a damaged stream of commands", "either"),
    38: Xid("the driver's firmware failed", "device"),
    43: Xid("a program's work was stopped after an error of its own", "program"),
    45: Xid("a program's work was cleared away, mostly after another error or a kill", "program"),
    48: Xid("two bits of memory flipped in one word and could not be corrected", "device"),
    62: Xid("the device's own controller halted", "device"),
    63: Xid("memory pages were retired or rows remapped", "device"),
    64: Xid("memory pages could not be retired or rows not remapped", "device"),
    69: Xid("an error in the engine of graphics and compute", "either"),
    74: Xid("an error of NVLink", "device"),
    79: Xid("the device has fallen off the bus", "device"),
    92: Xid("many bits flipped and were corrected", "device"),
    94: Xid("a memory error that was kept to one program", "device"),
    95: Xid("a memory error that was not kept to one program", "device"),
    109: Xid("a switch between programs took too long", "either"),
    119: Xid("the device's system processor did not answer the driver", "device"),
    120: Xid("the device's system processor failed", "device"),
    121: Xid("an error of the link to the processor (C2C)", "device"),
    140: Xid("a memory error that was not recovered", "device"),
    149: Xid("an error of NVLink that cannot be recovered", "device"),
}


def xid(code: int) -> Xid:
    """What is known of a number."""
    return _KNOWN.get(code, Xid("an error of the driver", "either"))

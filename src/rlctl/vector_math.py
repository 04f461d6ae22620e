"""Why a process that computes with torch on a CPU begins with a few small calls, and these calls."""

from __future__ import annotations

import functools


@functools.cache
def warm_up() -> None:
    """Let torch's vector math set itself up on one thread. Call it before anything else is computed.

    MKL's vector functions choose their code at their first call, and threads that make it at the same time race (torch
    2.13 with MKL 2024.2 on AMD processors): in 10 to 25 % of fresh processes the first parallel `cos`, with which a
    model's rotary table is made, was off by up to 1.5e-4 in one thread's half. Later calls are right.
    """
    import torch

    few = torch.linspace(0.1, 0.9, 16)  # too few elements for a second thread
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh, torch.erf):
        function(few)
        function(few.double())
    torch.pow(few, few)
    torch.pow(few.double(), few.double())

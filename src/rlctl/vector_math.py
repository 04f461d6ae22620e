"""Why a process that computes with torch on a CPU begins with a few small calls, and these calls."""

from __future__ import annotations

import functools


@functools.cache
def warm_up() -> None:
    """Initialize torch's vector math on one thread; call before any computation. MKL's vector functions select code at
    their first call, and concurrent first calls race (torch 2.13 with MKL 2024.2 on AMD): in 10 to 25 % of fresh
    processes the first parallel `cos` was off by up to 1.5e-4 in one thread's half."""
    import torch

    few = torch.linspace(0.1, 0.9, 16)  # too few elements for a second thread
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh, torch.erf):
        function(few)
        function(few.double())
    torch.pow(few, few)
    torch.pow(few.double(), few.double())

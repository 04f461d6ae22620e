"""Imports all that the ranks of a pool need. The server that they are forked from imports this module once."""

from __future__ import annotations

import gc

import pytest  # noqa: F401 - the main module, which each process imports
import torch._dynamo  # noqa: F401 - torch imports it when the first optimizer is made, and takes seconds for it

from rlctl.backends.megatron import cpu

cpu.install()

import transformers.models.auto.modeling_auto  # noqa: E402, F401

import rlctl.backends.dtensor.worker  # noqa: E402, F401
from rlctl.backends.dtensor import checkpoint, lora, model, optimizer, tensor_parallel  # noqa: E402, F401
from support import (  # noqa: E402, F401
    critic_cases,
    dtensor_cases,
    host_state_cases,
    lora_cases,
    parallel_cases,
    parallel_families,
)

# What is imported stays. Megatron-Core collects garbage at every save and load, which would look through all of it.
gc.collect()
gc.freeze()

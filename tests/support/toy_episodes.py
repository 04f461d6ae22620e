"""Courses of episodes that a run does not have."""

from __future__ import annotations

import asyncio

from rlctl.rollouts.episodes import Episode

TURNS, TOKENS_A_TURN = 3, 5
REPLY = (11, 12, 13)


async def echo(episode: Episode) -> None:
    """Three answers, and an environment that takes its time to say the same between them. The reward is the number of
    turns in which all tokens were used."""
    full = 0
    for turn in range(TURNS):
        if turn:
            await asyncio.sleep(0.01 * (len(episode.tokens) % 3))
            episode.read(REPLY)
        answer = await episode.answer(max_new_tokens=TOKENS_A_TURN)
        full += answer.stop_reason == "length"
    episode.rewards, episode.stop_reason = [float(full)], "done"


async def broken(episode: Episode) -> None:
    """An environment that fails after the first answer."""
    await episode.answer(max_new_tokens=2)
    raise ValueError("the environment is broken")

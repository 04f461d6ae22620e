"""The built-in sliding puzzle and wordle, played by scripted messages."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.environments.builtin.sliding_puzzle import FROM, SlidingPuzzle
from rlctl.environments.builtin.wordle import WORDS, Wordle, marks
from rlctl.environments.interface import Step

EMPTY: dict[str, Any] = {"prompt": [], "answer": None}


def say(environment: Any, text: str) -> Step:
    return environment.step({"role": "assistant", "content": text})


def test_wordle_marks_each_letter() -> None:
    assert {len(word) for word in WORDS} == {5}
    assert len(set(WORDS)) == len(WORDS)
    assert marks("sheep", "speed") == "G-GGY"
    assert marks("apple", "maple") == "Y-GGG"
    assert marks("eerie", "crane") == "--Y-G"
    game = Wordle()
    game.reset(EMPTY, 3)
    other = next(word for word in WORDS if word != game.word)
    assert say(game, "crane, I think").metrics == {"no_guess": 1.0}
    assert "4 guesses left" in say(game, f"<guess>{other.upper()}</guess>").messages
    won = say(game, f"<guess>{other}</guess> no, <guess>{game.word}</guess>")
    assert (won.reward, won.done) == (1.0, True)
    game.reset(EMPTY, 3)
    assert [say(game, "no").done for _ in range(6)] == [False] * 5 + [True]


def act(puzzle: SlidingPuzzle, action: str) -> Step:
    return say(puzzle, f"I think about <action>. So\n<action> {action} </action>")


def undo(size: int, seed: int) -> tuple[SlidingPuzzle, list[str]]:
    """Return a puzzle that was reset, and the shortest actions that solve it, by search."""
    puzzle = SlidingPuzzle(size, shuffle_moves=5)
    puzzle.reset(EMPTY, seed)
    start, reached = list(puzzle.tiles), {tuple(puzzle.tiles): []}
    waiting = [tuple(start)]
    for state in waiting:
        if list(state) == puzzle.solved:
            break
        for move in FROM:
            puzzle.tiles = list(state)
            if (place := puzzle.beside_gap(move)) is not None:
                puzzle.slide(place)
                if tuple(puzzle.tiles) not in reached:
                    reached[tuple(puzzle.tiles)] = [*reached[state], move]
                    waiting.append(tuple(puzzle.tiles))
    puzzle.tiles = start
    return puzzle, reached[tuple(puzzle.solved)]


@pytest.mark.parametrize("seed", range(4))
def test_a_puzzle_is_shuffled_by_an_odd_number_of_moves_and_can_be_solved(seed: int) -> None:
    puzzle, actions = undo(3, seed)
    assert len(actions) in (1, 3, 5)
    for action in actions[:-1]:
        step = act(puzzle, action)
        assert (step.reward, step.done, step.metrics) == (0.0, False, {"moves": 1.0})
    step = act(puzzle, actions[-1])
    assert (step.reward, step.done) == (1.0, True)


def test_moves_of_the_puzzle() -> None:
    puzzle = SlidingPuzzle(size=2, max_moves=6)
    puzzle.reset(EMPTY, 0)
    puzzle.tiles = [1, 2, 0, 3]
    board = "  +------+\n1 | 1  2 |\n2 |    3 |\n  +------+\n     1  2 "
    assert (
        act(puzzle, "view").messages
        == f"<environment>\n{board}\n\nThis is the board. No move was made.\n</environment>\n"
    )
    assert "no action in tags" in str(say(puzzle, "<action>up</action> or <action>down").messages)
    assert puzzle.moves == 0  # neither is a move
    told = {"up": "No tile can slide up", "jump": "no such action", "slide 1": "slide ROW COLUMN"}
    told |= {"slide 3 1": "from 1 to 2", "slide 1 2": "not next to the gap", "slide 1 1": "Tile 1 slid into the gap"}
    for action, text in told.items():
        assert text in str(act(puzzle, action).messages)
    assert (puzzle.tiles, puzzle.moves) == ([0, 2, 1, 3], 6)
    over = act(puzzle, "up")
    assert (over.done, over.reward, puzzle.tiles) == (True, 0.0, [0, 2, 1, 3])

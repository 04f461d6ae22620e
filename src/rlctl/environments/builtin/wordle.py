"""Wordle: a word of five letters, six guesses, and for each letter whether it is right, elsewhere, or absent."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.environments.interface import Message, Step

TEXT = """
about above actor adapt admit adult after again agent agree alarm album alive allow alone amber angle ankle apple
apron arena argue arise armor aside aware bacon badge baker basic beach beard begin below bench berry birth black
blade blame blank blast blaze blend blind block bloom board boast bonus brain brand brave bread break brick bride
brief bring broad broom brown brush build bunch cabin cable camel candy canoe cargo carry catch cause chain chair
chalk charm chart chase cheap check cheek chess chest chief child civil claim class clean clear clerk climb clock
close cloth cloud coach coast coral couch count court cover crack craft crane crash cream crisp cross crowd crown
curve cycle daily dance delay depth diary doubt dozen draft drama dream dress drift drink drive eager eagle early
earth elbow empty enemy enjoy enter equal error essay event every exact extra fable faint faith false fancy fault
favor feast fence ferry fever field fight final first flame flash fleet float flood floor flour flute focus force
forge forty found frame fresh front frost fruit funny giant given glass globe glory glove grace grade grain grand
grant grape graph grass great green greet group guard guess guest guide habit happy harsh heart heavy hedge hello
honey honor horse hotel house human humor ideal image index inner input ivory jelly jewel joint joker judge juice
knife knock label labor large laser laugh layer learn lemon level light limit local logic loyal lucky lunch magic
major maple march match mayor medal melon mercy metal meter minor mixed model money month moral motor mount mouse
mouth movie music naval nerve never night noble noise north novel nurse ocean offer olive onion opera orbit order
other outer owner paint panel paper party patch peace pearl phase phone photo piano piece pilot pitch place plain
plane plant plate point porch pound power press price pride prize proof proud pulse punch pupil purse queen quest
quick quiet quote radio raise range rapid ratio reach ready realm rebel reply rider ridge right rival river roast
robin robot rocky rough round route royal rural sauce scale scarf scene scout seven shade shake shape share sharp
sheep sheet shelf shell shift shine shirt shock shore short shout skill skirt sleep slice slide slope small smart
smile smoke snake solid solve sound south space spare spark speak speed spell spend spice spoon sport stage stair
stamp stand start state steam steel stick still stone store storm story straw study sugar sunny sweet swift sword
table taste teach thank theme thick thing think third three throw thumb tiger title toast today token torch total
touch tower track trade trail train treat trend trial tribe trick truck trust truth tulip uncle under union unite
upper urban usual valid value video visit vital vivid voice wagon waste watch water whale wheat wheel white whole
widow woman world worry worth wound wrist write yacht young youth zebra
"""
WORDS = tuple(TEXT.split())


class Wordle:
    """The reward is 1 for finding the word. A message without a word of five letters costs a guess too."""

    def __init__(self, guesses: int = 6) -> None:
        self.guesses = guesses

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.word, self.made = random.Random(seed).choice(WORDS), 0
        rules = (
            f"Find an English word of five letters in {self.guesses} guesses. Write a guess as <guess>crane</guess>. "
            "For each letter you are told G where it is right, Y where the word has it in another place, and - where "
            "it does not have it. Make your first guess."
        )
        return [{"role": "user", "content": rules}]

    def step(self, message: Message) -> Step:
        self.made += 1
        last = self.made == self.guesses
        guesses = re.findall(r"<guess>\s*([a-zA-Z]{5})\s*</guess>", message["content"])
        if not guesses:
            note = "There is no guess. Write a word of five letters as <guess>crane</guess>."
            return Step(note, done=last, metrics={"no_guess": 1.0})
        guess = guesses[-1].lower()
        right = guess == self.word
        note = (
            f"{' '.join(guess.upper())}\n{' '.join(marks(guess, self.word))}\n{self.guesses - self.made} guesses left."
        )
        return Step(note, reward=float(right), done=right or last, metrics={"guesses": 1.0})


def marks(guess: str, word: str) -> str:
    """Return G, Y or - for each letter. No letter is marked more often than the word has it; letters in place come
    first."""
    left = Counter(b for a, b in zip(guess, word, strict=True) if a != b)
    letters = ""
    for a, b in zip(guess, word, strict=True):
        elsewhere = a != b and left[a] > 0
        left[a] -= elsewhere
        letters += "G" if a == b else "Y" if elsewhere else "-"
    return letters

"""Prompts that look like English: common words, most of them one token in any model's vocabulary."""

from __future__ import annotations

from random import Random

_WORDS = (
    "the of and to in is that it was for on are with they be at one have this from had not but what all were when "
    "we there can said which do their time if will way about many then them would write like so these her long "
    "make thing see him two has look more day could go come did number sound no most people my over know water "
    "than call first who may down side been now find any new work part take get place made live where after back "
    "little only round man year came show every good me give our under name very through just form great think "
    "say help low line before turn cause much mean differ move right boy old too same tell does set three want "
    "air well also play small end put home read hand port large add even land here must big high such follow act "
    "why ask men change went light kind off need house picture try us again animal point mother world near build "
    "self earth father head stand own page should country found answer school grow study still learn plant cover "
    "food sun four between state keep eye never last let thought city tree cross farm hard start might story saw "
    "far sea draw left late run while press close night real life few north open seem together next white "
    "children begin got walk example ease paper group always music those both mark often letter until mile river "
    "car feet care second book carry took science eat room friend began idea fish mountain stop once base hear "
    "horse cut sure watch color face wood main"
).split()

_SENTENCE = (6, 14)  # words
_COMMA = 0.08  # after a word


def text(rng: Random, n_tokens: int) -> str:
    """Sentences of about `n_tokens` tokens: each word and each mark is counted as one."""
    pieces: list[str] = []
    n_left = 0  # words until the full stop
    begins = True
    for i in range(n_tokens):
        if n_left == 0 and not begins and i < n_tokens - 1:
            pieces.append(".")
            begins = True
            continue
        if not begins and n_left > 1 and pieces[-1] != "," and rng.random() < _COMMA:
            pieces.append(",")
            continue
        if begins:
            n_left = rng.randint(*_SENTENCE)
        word = rng.choice(_WORDS)
        pieces.append(f" {word.capitalize() if begins else word}")
        begins, n_left = False, max(n_left - 1, 0)
    return "".join(pieces).lstrip()

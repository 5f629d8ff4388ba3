"""From chosen tokens to news for the client: appended, detokenised, stopped where the text ends."""

from __future__ import annotations

import codecs

import msgspec

from cppbatch.engine.request import FinishReason, TokenLogprob
from cppbatch.engine.sampling import Choice
from cppbatch.engine.sequence import News, Sequence
from cppbatch.engine.vocabulary import Tokens


class Outputs:
    """Knows when a text has ended. What is new of a sequence is gathered in its `news`."""

    def __init__(self, vocab: Tokens) -> None:
        self._vocab = vocab
        self.n_forced = 0
        """Tokens that a grammar gave, without a decode for each."""

    def accept(self, sequence: Sequence, choice: Choice) -> FinishReason | None:
        """Appends the token, and those that a grammar forces then; why the text has ended, if it has."""
        if sequence.request.task == "embed":
            sequence.embedding, sequence.error = choice.embedding, choice.error
            return FinishReason.ERROR if choice.error else FinishReason.STOP
        if reason := self.say(sequence):
            return reason
        self._open(sequence)
        if sequence.max_new == 0:
            return FinishReason.LENGTH
        if choice.error is not None:
            sequence.error, sequence.error_field = choice.error, choice.error_field
            return FinishReason.ERROR
        if self._ends(sequence, choice.token):
            return FinishReason.STOP
        return self._append(sequence, choice.token, choice.logprob) or self._force(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Catches up with a sequence whose tokens are told already: only what comes next is news."""
        if sequence.params.echo and sequence.n_generated:
            sequence.echoed = len(self._prompt_text(sequence))
        self.say(sequence)
        sequence.news = News()

    def say(self, sequence: Sequence) -> FinishReason | None:
        """Detokenises what was appended. Mostly one token; others when a step was interrupted in the midst of it."""
        while sequence.n_said < sequence.n_tokens:
            token = int(sequence.tokens[sequence.n_said])
            is_seen = not sequence.params.skip_special_tokens or token in sequence.recipe.visible
            piece = self._vocab.piece(token, special=is_seen)
            sequence.n_said += 1
            sequence.news.tokens.append(token)
            sequence.news.text += sequence.text.push(piece)
            if sequence.text.stopped:
                return FinishReason.STOP
        return None

    def _ends(self, sequence: Sequence, token: int) -> bool:
        return token in self._vocab.eog or token in sequence.params.stop_token_ids

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        sequence.append(token)
        if logprob:
            at = sequence.echoed + sequence.text.n_characters
            sequence.news.logprobs.append(msgspec.structs.replace(logprob, text_offset=at))
        if sequence.constraint and not sequence.constraint.accept(token):
            sequence.error, sequence.error_field = sequence.constraint.error, sequence.params.grammar_field
            return FinishReason.ERROR
        if self.say(sequence) or (sequence.constraint and sequence.constraint.is_done):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.n_left <= 0 else None

    def _force(self, sequence: Sequence) -> FinishReason | None:
        if sequence.constraint is None:
            return None
        for token in sequence.constraint.forced():
            if self._ends(sequence, token) or token in sequence.recipe.never:
                return None  # that is for the next row to decide
            self.n_forced += 1
            if reason := self._append(sequence, token):
                return reason
        return None

    def _open(self, sequence: Sequence) -> None:
        """What stands before the first token: the prompt, where `echo` asks for it."""
        if not sequence.params.echo or sequence.n_generated:
            return
        text = self._prompt_text(sequence)
        logprobs, decoder, at = [], codecs.getincrementaldecoder("utf-8")("replace"), 0
        for entry in sequence.prompt_logprobs:
            logprobs.append(msgspec.structs.replace(entry, text_offset=at))
            new = decoder.decode(entry.piece)
            if text.startswith(new, at):  # else the tokenizer has added it
                at += len(new)
        sequence.echoed = len(text)
        sequence.news.text, sequence.news.logprobs = text, logprobs

    def _prompt_text(self, sequence: Sequence) -> str:
        if isinstance(sequence.request.prompt, str):
            return sequence.request.prompt
        tokens = sequence.tokens[: sequence.n_prompt].tolist()
        return b"".join(self._vocab.piece(token, special=True) for token in tokens).decode("utf-8", "replace")

"""From chosen tokens to news: appended, and looked at whether they end the text."""

from __future__ import annotations

from cppbatch.engine.request import FinishReason, TokenLogprob
from cppbatch.engine.sampling import SamplerOutput
from cppbatch.engine.sequence import News, Seq
from cppbatch.engine.teller import Teller
from cppbatch.engine.vocabulary import Vocabulary

_MOST_FORCED = 64  # tokens of a sequence in a step, each of which takes some 30 us


class Outputs:
    """Decides what the next step depends on: whether a sequence goes on. What there is to tell waits in its `news`.

    Texts can wait, until the device computes again; but not those in which a stop string is looked for.
    """

    def __init__(self, vocab: Vocabulary, teller: Teller) -> None:
        self._vocab = vocab
        self._teller = teller
        self.n_forced = 0
        """Tokens that a grammar gave, without a decode for each."""

    def accept(self, sequence: Seq, choice: SamplerOutput) -> FinishReason | None:
        """Appends the token, and those that a grammar forces then; why the text has ended, if it has."""
        if sequence.request.task == "embed":
            sequence.embedding, sequence.error = choice.embedding, choice.error
            return FinishReason.ERROR if choice.error else FinishReason.STOP
        if reason := self.note(sequence):
            return reason
        sequence.news.opens = sequence.params.echo and not sequence.n_generated
        if sequence.max_new == 0:
            return FinishReason.LENGTH
        if choice.error is not None:
            sequence.error, sequence.error_field = choice.error, choice.error_field
            return FinishReason.ERROR
        if self._ends(sequence, choice.token):
            return FinishReason.STOP
        return self._append(sequence, choice.token, choice.logprob) or self._force(sequence)

    def resume(self, sequence: Seq) -> None:
        """Catches up with a sequence whose tokens are told already: only what comes next is news."""
        if sequence.params.echo and sequence.n_generated:
            sequence.echoed = len(self._teller.prompt_text(sequence))
        self.note(sequence)
        self._teller.say(sequence.news)
        sequence.news = News(sequence)

    def note(self, sequence: Seq, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Makes news of what was appended. Mostly one token; others when a step was interrupted in the midst of it."""
        while sequence.n_noted < sequence.n_tokens:
            token = int(sequence.tokens[sequence.n_noted])
            sequence.n_noted += 1
            if logprob:
                sequence.news.logprobs[len(sequence.news.tokens)] = logprob
            sequence.news.tokens.append(token)
            if sequence.params.stop:
                self._teller.say(sequence.news)
                if sequence.text.stopped:
                    return FinishReason.STOP
        return None

    def _ends(self, sequence: Seq, token: int) -> bool:
        return token in self._vocab.eog or token in sequence.params.stop_token_ids

    def _append(self, sequence: Seq, token: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        sequence.append(token)
        if sequence.constraint and not sequence.constraint.accept(token):
            sequence.error, sequence.error_field = sequence.constraint.error, sequence.params.grammar_field
            return FinishReason.ERROR
        if self.note(sequence, logprob) or (sequence.constraint and sequence.constraint.is_done):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.n_left <= 0 else None

    def _force(self, sequence: Seq) -> FinishReason | None:
        if sequence.constraint is None:
            return None
        for token in sequence.constraint.forced()[:_MOST_FORCED]:  # the rest in the next step
            if self._ends(sequence, token) or token in sequence.sampling.never:
                return None  # that is for the next row to decide
            self.n_forced += 1
            if reason := self._append(sequence, token):
                return reason
        return None

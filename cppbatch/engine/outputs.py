"""From chosen tokens to news for the client: appended, detokenised, stopped where the text ends."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

import msgspec

from cppbatch.engine.request import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.engine.sampling import Choice
from cppbatch.engine.sequence import Sequence
from cppbatch.engine.vocabulary import Tokens


@dataclass(slots=True)
class News:
    """What a step brought one request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def event(self, sequence: Sequence) -> GenerationEvent:
        """As an event, not the last one."""
        return GenerationEvent(request_id=sequence.id, text=self.text, tokens=self.tokens, logprobs=self.logprobs)


class Outputs:
    """Knows when a text has ended."""

    def __init__(self, vocab: Tokens) -> None:
        self._vocab = vocab
        self.n_forced = 0
        """Tokens that a grammar gave, without a decode for each."""

    def accept(self, sequence: Sequence, choice: Choice) -> tuple[News, FinishReason | None]:
        """Appends the token, and those that a grammar forces then; why the text has ended, if it has."""
        news = self._opening(sequence)
        if sequence.max_new == 0:
            return news, FinishReason.LENGTH
        if choice.error is not None:
            sequence.error = choice.error
            return news, FinishReason.ERROR
        if self._ends(sequence, choice.token):
            return news, FinishReason.STOP
        if choice.logprob:
            news.logprobs.append(self._placed(sequence, choice.logprob))
        return news, self._append(sequence, choice.token, news) or self._force(sequence, news)

    def _ends(self, sequence: Sequence, token: int) -> bool:
        return token in self._vocab.eog or token in sequence.params.stop_token_ids

    def _append(self, sequence: Sequence, token: int, news: News) -> FinishReason | None:
        sequence.append(token)
        news.tokens.append(token)
        news.text += sequence.text.push(self._vocab.piece(token, special=not sequence.params.skip_special_tokens))
        if sequence.constraint:
            sequence.error = sequence.constraint.accept(token)
            if sequence.error is not None:
                return FinishReason.ERROR
            if sequence.constraint.is_done:
                return FinishReason.STOP
        if sequence.text.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.n_left <= 0 else None

    def _force(self, sequence: Sequence, news: News) -> FinishReason | None:
        if sequence.constraint is None:
            return None
        for token in sequence.constraint.forced():
            if self._ends(sequence, token):
                return FinishReason.STOP
            self.n_forced += 1
            if reason := self._append(sequence, token, news):
                return reason
        return None

    # --- echo ---------------------------------------------------------------------------------------------------

    def _opening(self, sequence: Sequence) -> News:
        """What stands before the first token: the prompt, where `echo` asks for it."""
        if not sequence.params.echo or sequence.n_generated:
            return News()
        prompt = sequence.request.prompt
        text = prompt if isinstance(prompt, str) else self._text(sequence)
        sequence.echoed = len(text)
        logprobs, decoder, at = [], codecs.getincrementaldecoder("utf-8")("replace"), 0
        for entry in sequence.prompt_logprobs:
            logprobs.append(msgspec.structs.replace(entry, text_offset=at))
            new = decoder.decode(entry.piece)
            if text.startswith(new, at):  # else the tokenizer has added it
                at += len(new)
        return News(text=text, logprobs=logprobs)

    def _text(self, sequence: Sequence) -> str:
        tokens = sequence.tokens[: sequence.n_prompt].tolist()
        return b"".join(self._vocab.piece(token, special=True) for token in tokens).decode("utf-8", "replace")

    @staticmethod
    def _placed(sequence: Sequence, entry: TokenLogprob) -> TokenLogprob:
        return msgspec.structs.replace(entry, text_offset=sequence.echoed + sequence.text.n_characters)

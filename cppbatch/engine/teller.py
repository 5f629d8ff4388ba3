"""From news to events: detokenised, as text that is certain by now. Nothing of it decides what the next step does."""

from __future__ import annotations

import codecs

import msgspec

from cppbatch.engine.request import GenerationEvent
from cppbatch.engine.sequence import News, Seq
from cppbatch.engine.vocabulary import Vocabulary


class Teller:
    """Knows how a sequence's news are told. Any one thread may, if it takes each sequence's in their order."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab

    def event(self, news: News) -> GenerationEvent:
        """The event of these news; made once, however often it is asked for."""
        if news.event is None:
            self.say(news)
            end = news.end or {}
            if news.end:
                news.text += news.sequence.text.flush()
                end["stop"] = news.sequence.text.stop
            news.event = GenerationEvent(
                request_id=news.sequence.id, text=news.text, tokens=news.tokens, logprobs=news.told_logprobs, **end
            )
        return news.event

    def say(self, news: News) -> None:
        """Brings the text of the news up to their tokens."""
        sequence = news.sequence
        if news.opens:
            self._open(news)
        while news.n_said < len(news.tokens):
            token, logprob = news.tokens[news.n_said], news.logprobs.get(news.n_said)
            is_seen = not sequence.params.skip_special_tokens or token in sequence.sampling.visible
            piece = self._vocab.piece(token, special=is_seen)
            news.n_said += 1  # from here on nothing of it is said again, whatever interrupts
            if logprob:
                at = sequence.echoed + sequence.text.n_characters
                news.told_logprobs.append(msgspec.structs.replace(logprob, text_offset=at))
            news.text += sequence.text.push(piece)

    def _open(self, news: News) -> None:
        """What stands before the first token: the prompt, where `echo` asks for it."""
        news.opens, sequence = False, news.sequence
        text = self.prompt_text(sequence)
        logprobs, decoder, at = [], codecs.getincrementaldecoder("utf-8")("replace"), 0
        for entry in sequence.prompt_logprobs:
            logprobs.append(msgspec.structs.replace(entry, text_offset=at))
            new = decoder.decode(entry.piece)
            if text.startswith(new, at):  # else the tokenizer has added it
                at += len(new)
        sequence.echoed = len(text)
        news.text, news.told_logprobs = text, logprobs

    def prompt_text(self, sequence: Seq) -> str:
        """What `echo` shows."""
        if isinstance(sequence.request.prompt, str):
            return sequence.request.prompt
        tokens = sequence.tokens[: sequence.n_prompt].tolist()
        return b"".join(self._vocab.piece(token, special=True) for token in tokens).decode("utf-8", "replace")

"""Converts sampled tokens to events: appends tokens, checks for the end of the text, detokenises and queues."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Container
from time import perf_counter

import msgspec

from cppbatch.engine.observe.metrics import Metrics
from cppbatch.engine.request import FinishReason, GenerationEvent, MediaPrompt, TokenLogprob
from cppbatch.engine.sampling import SamplerOutput
from cppbatch.engine.sequence import Seq, StepOutput
from cppbatch.engine.vocabulary import Vocabulary


class OutputProcessor:
    """Decides whether a sequence continues, detokenises its tokens, and keeps events until they are taken.

    For each sampled token the engine calls `accept`, which appends it and returns a finish reason if the sequence
    ends, then `emit` or `finish`, which queues a `StepOutput`. `event` detokenises that into a `GenerationEvent`.
    `take_all` (events) or `take_outputs` (step outputs) empties the queue; `keep` delivers events of reserved requests.

    Threads: only the engine's thread calls these methods, except `event`. One other thread may call `event` for the
    outputs of `take_outputs`, in order, while the engine computes the next step. Only one of the two threads touches
    the text of a sequence: the one that calls `event`; or, if the request has stop strings, which decide whether the
    sequence continues, the engine's thread until the sequence has ended.
    """

    def __init__(self, vocab: Vocabulary, metrics: Metrics) -> None:
        self._vocab = vocab
        self._metrics = metrics
        self.n_forced_tokens = 0
        """Tokens forced by a grammar, which are appended without a decode each."""
        self._pending: list[StepOutput] = []  # outputs of the last step
        self._kept: list[GenerationEvent] = []  # events of earlier steps
        self._inboxes: dict[str, deque[GenerationEvent]] = {}  # for the events of reserved requests, by request id

    # --- tokens, on the engine's thread -------------------------------------------------------------------------

    def accept(self, sequence: Seq, sampled: SamplerOutput) -> FinishReason | None:
        """Appends the sampled token, or those that end the reasoning, and then the tokens forced by a grammar.

        Returns the finish reason if the sequence has ended, else None. For an embedding request, stores the vector.
        """
        if sequence.request.task == "embed":
            sequence.embedding, sequence.error = sampled.embedding, sampled.error
            return FinishReason.ERROR if sampled.error else FinishReason.STOP
        if reason := self._add_tokens(sequence):
            return reason
        if sequence.params.echo and not sequence.n_generated:  # later tokens of the step, accepted drafts, keep it
            sequence.output.starts_text = True
        if sequence.max_new == 0:
            return FinishReason.LENGTH
        if sampled.error is not None:
            sequence.error, sequence.error_field = sampled.error, sampled.error_field
            return FinishReason.ERROR
        closing = self._closing(sequence)
        if not closing and self._ends_text(sequence, sampled.token):
            sequence.has_end_token, sequence.output.end_logprob = True, sampled.logprob
            return FinishReason.STOP
        if closing:
            reason = self._append_all(sequence, closing)
        else:
            reason = self._append(sequence, sampled.token, sampled.logprob)
        return reason or self._append_forced(sequence)

    def resume(self, sequence: Seq) -> None:
        """Detokenises the tokens that a resumed sequence already has. Its events only have later tokens."""
        if sequence.params.echo and sequence.n_generated:
            sequence.echoed = len(self._prompt_text(sequence))
        self._add_tokens(sequence)
        self._detokenize(sequence.output)
        sequence.output = StepOutput(sequence)

    def emit(self, sequence: Seq) -> None:
        """Queues the new tokens of a continuing sequence."""
        output, sequence.output = sequence.output, StepOutput(sequence)
        wanted = sequence.request.usage_events
        if wanted != "end" and (wanted == "all" or sequence.n_generated == len(output.tokens)):  # the first tokens
            output.usage = sequence.usage(perf_counter())
        self._pending.append(output)

    def report(self, sequence: Seq, now: float) -> None:
        """Queues an output without tokens that reports the progress of the sequence's prefill."""
        output = StepOutput(sequence)
        output.usage = sequence.usage(now)
        self._pending.append(output)

    def finish(self, sequence: Seq, reason: FinishReason, now: float) -> None:
        """Queues the last output of a sequence."""
        self._add_tokens(sequence)
        output, sequence.output = sequence.output, StepOutput(sequence)
        output.finish_reason, output.usage = reason, sequence.usage(now)
        self._pending.append(output)

    def _ends_text(self, sequence: Seq, token: int) -> bool:
        return token in self._vocab.eog or token in sequence.params.stop_token_ids

    def _append(self, sequence: Seq, token: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        sequence.append(token)
        if sequence.constraint and not sequence.constraint.accept(token):
            sequence.error, sequence.error_field = sequence.constraint.error, sequence.params.grammar_field
            return FinishReason.ERROR
        if self._add_tokens(sequence, logprob) or (sequence.constraint and sequence.constraint.is_done):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.n_left <= 0 else None

    def extend(self, sequence: Seq, tokens: list[int]) -> FinishReason | None:
        """Appends given, not sampled, tokens. Returns the finish reason if they end the text, else None."""
        if sequence.params.echo and not sequence.n_generated:
            sequence.output.starts_text = True
        return self._append_all(sequence, tokens)

    @staticmethod
    def _closing(sequence: Seq) -> list[int]:
        """The tokens that end its reasoning now, instead of a sampled token; [] if it continues."""
        if sequence.reasoning is None:
            return []
        sequence.reasoning.follow(sequence.text_tokens(sequence.n_prompt + sequence.reasoning.n_followed).tolist())
        return sequence.reasoning.closing(sequence.n_room)

    def _append_all(self, sequence: Seq, tokens: list[int]) -> FinishReason | None:
        for token in tokens:
            if reason := self._append(sequence, token):
                return reason
        return None

    def _append_forced(self, sequence: Seq) -> FinishReason | None:
        if sequence.constraint is None:
            return None
        most = min(64, sequence.n_room)  # each takes about 30 us; the rest follows in the next step
        for token in sequence.constraint.forced_tokens()[:most]:
            if self._ends_text(sequence, token) or token in sequence.sampling.banned_ids:
                return None  # the next step samples this position instead
            self.n_forced_tokens += 1
            if reason := self._append(sequence, token):
                return reason
        return None

    def _add_tokens(self, sequence: Seq, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Adds appended tokens to the sequence's output. STOP if their text contains a stop string.

        Usually one token; more if a step was interrupted after `Seq.append`.
        """
        for token in sequence.text_tokens(sequence.n_output).tolist():
            sequence.n_output += 1
            if logprob:
                sequence.output.logprobs[len(sequence.output.tokens)] = logprob
            sequence.output.tokens.append(token)
            if sequence.params.stop:
                self._detokenize(sequence.output)
                if sequence.text.stopped:
                    return FinishReason.STOP
        return None

    # --- text, on the thread that calls `event` -----------------------------------------------------------------

    def event(self, output: StepOutput) -> GenerationEvent:
        """The event for a step output. Created once: repeated calls return the same one."""
        if output.event is None:
            self._detokenize(output)
            output.event = self._last_event(output) if output.finish_reason else self._next_event(output)
        return output.event

    @staticmethod
    def _next_event(output: StepOutput) -> GenerationEvent:
        return GenerationEvent(
            request_id=output.sequence.id,
            text=output.text,
            tokens=output.tokens,
            token_texts=output.token_texts,
            logprobs=output.text_logprobs,
            usage=output.usage,
        )

    @staticmethod
    def _last_event(output: StepOutput) -> GenerationEvent:
        sequence = output.sequence
        output.text += sequence.text.flush()
        if output.end_logprob:
            offset = sequence.echoed + sequence.text.n_characters
            output.text_logprobs.append(msgspec.structs.replace(output.end_logprob, text_offset=offset))
        if output.token_texts:
            output.token_texts[-1] += sequence.text.completed
        return GenerationEvent(
            request_id=sequence.id,
            text=output.text,
            tokens=output.tokens,
            token_texts=output.token_texts,
            logprobs=output.text_logprobs,
            embedding=sequence.embedding,
            finish_reason=output.finish_reason,
            stop=sequence.text.stop,
            seed=sequence.seed,
            usage=output.usage,
            error=sequence.error,
            error_field=sequence.error_field,
        )

    def _detokenize(self, output: StepOutput) -> None:
        """Detokenises the output's tokens that have no text yet."""
        sequence = output.sequence
        if output.starts_text:
            self._echo_prompt(output)
        while output.n_detokenized < len(output.tokens):
            token, logprob = output.tokens[output.n_detokenized], output.logprobs.get(output.n_detokenized)
            is_seen = not sequence.params.skip_special_tokens or token in sequence.sampling.visible_ids
            piece = self._vocab.piece(token, special=is_seen)
            output.n_detokenized += 1  # before the text changes, so that an interrupted call never repeats text
            if logprob:
                offset = sequence.echoed + sequence.text.n_characters
                output.text_logprobs.append(msgspec.structs.replace(logprob, text_offset=offset))
            output.text += sequence.text.push(piece)
            output.token_texts.append(sequence.text.completed)

    def _echo_prompt(self, output: StepOutput) -> None:
        """Starts the text with the prompt (`echo`), and the log-probabilities with those of the prompt."""
        output.starts_text, sequence = False, output.sequence
        text = self._prompt_text(sequence)
        logprobs, decoder, offset = [], codecs.getincrementaldecoder("utf-8")("replace"), 0
        for entry in sequence.prompt_logprobs:
            logprobs.append(msgspec.structs.replace(entry, text_offset=offset))
            new = decoder.decode(entry.piece)
            if text.startswith(new, offset):  # otherwise the tokenizer added this token, and it is not in the text
                offset += len(new)
        sequence.echoed = len(text)
        output.text, output.text_logprobs = text, logprobs

    def _prompt_text(self, sequence: Seq) -> str:
        if isinstance(sequence.request.prompt, str):
            return sequence.request.prompt
        if isinstance(sequence.request.prompt, MediaPrompt):
            return sequence.request.prompt.text
        tokens = sequence.text_tokens(0)[: sequence.n_prompt].tolist()
        return b"".join(self._vocab.piece(token, special=True) for token in tokens).decode("utf-8", "replace")

    # --- the queue, on the engine's thread ----------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        """Whether `take_all` would return any."""
        return bool(self._kept) or any(output.sequence.id not in self._inboxes for output in self._pending)

    def take_all(self) -> list[GenerationEvent]:
        """Removes and returns all events, in the order of each request, except those of reserved requests."""
        self.keep()
        events, self._kept = self._kept, []
        return events

    def take_outputs(self) -> list[StepOutput]:
        """Removes and returns the outputs of the last step, for a thread that calls `event` for each."""
        outputs, self._pending = self._pending, []
        return outputs

    def reserve(self, request_id: str, inbox: deque[GenerationEvent]) -> None:
        """Sends this request's events to `inbox`, up to its last one. `take_all` does not return them."""
        self._inboxes[request_id] = inbox

    def keep(self) -> None:
        """Converts the last step's outputs to events: for their inboxes, or kept for `take_all`."""
        for event in self._pending_events():
            inbox = self._inboxes.get(event.request_id)
            if inbox is None:
                self._kept.append(event)
                continue
            inbox.append(event)
            if event.finish_reason:
                del self._inboxes[event.request_id]
        self._pending = []

    def drop(self, ids: Container[str]) -> None:
        """Drops the events of these requests, and ends their reservations."""
        self._pending = [output for output in self._pending if output.sequence.id not in ids]
        self._inboxes = {request_id: inbox for request_id, inbox in self._inboxes.items() if request_id not in ids}

    def finished_ids(self) -> set[str]:
        """Ids of the requests with their last output in the last step."""
        return {output.sequence.id for output in self._pending if output.finish_reason}

    def _pending_events(self) -> list[GenerationEvent]:
        """Events for the last step's outputs, which stay in the queue."""
        if not self._pending:
            return []
        began = perf_counter()
        events = [self.event(output) for output in self._pending]
        made = perf_counter()
        self._metrics.count_output(began, made, made)
        return events

"""Random schedules of requests with pictures among others: every request gets the text that it gets alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cppbatch import Media, MediaPrompt
from cppbatch.config import Sharing
from tests.fake_encoder import as_read, fake_media, small_picture
from tests.fakes import FakeProposer, fake_engine
from tests.unit.test_random_schedules import (
    ADAPTERS,
    LONGEST,
    MEMORIES,
    N_BATCH,
    N_CTX,
    N_PARALLEL,
    OTHERS,
    SCHEDULES,
    SIZES,
    Action,
    Arrive,
    Run,
    Step,
    arrivals,
    small_scale,  # noqa: F401  a fixture
)


@st.composite
def arrivals_with_pictures(draw: st.DrawFn) -> Arrive:
    """At most LONGEST tokens: a text, one or two pictures, a text."""
    arrival = draw(arrivals())
    begin = draw(st.sampled_from(("", "abc", "abcd")))
    parts: list[str | Media] = [begin, small_picture(draw(st.integers(1, 2)), draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        parts += [draw(st.sampled_from(("", "e"))), small_picture(3, 2)]
    prompt = MediaPrompt([*parts, draw(st.sampled_from("abc"))])
    most = min(arrival.params.max_tokens or 1, LONGEST - len(as_read(prompt)))
    params = replace(arrival.params, max_tokens=most, min_tokens=min(most, arrival.params.min_tokens))
    return Arrive([], params, {**arrival.options, "picture": prompt})


class MediaRun(Run):
    """Requests with pictures among others."""

    def do(self, action: Action) -> None:
        if isinstance(action, Arrive) and "picture" in action.options:
            options = {**action.options}
            prompt = options.pop("picture")
            request_id = self.engine.add_request(prompt, action.params, **options)
            self.asked[request_id] = Arrive(as_read(prompt), action.params, options)
            self.check_accounting()
        else:
            super().do(action)


@settings(SCHEDULES, max_examples=1000)
@given(
    actions=st.lists(
        st.one_of(arrivals_with_pictures(), arrivals(), st.just(Step()), st.just(Step()), OTHERS),
        min_size=4,
        max_size=20,
    ),
    memory=MEMORIES,
    n_ctx=st.sampled_from((LONGEST, 20, 30, N_CTX)),
    sizes=SIZES,
    is_whole=st.booleans(),
)
def test_in_any_schedule_with_pictures_every_request_gets_the_text_it_gets_alone(
    actions: list[Action], memory: tuple[bool, Sharing], n_ctx: int, sizes: dict[str, Any], is_whole: bool
) -> None:
    unified, sharing = memory
    proposers = [FakeProposer()] if sizes.pop("drafts") else []
    more = 2 if sizes.get("may_pad") else 1
    engine = fake_engine(
        n_ctx=n_ctx if unified else N_CTX * more, n_batch=N_BATCH * more, n_parallel=N_PARALLEL * more,
        unified=unified, sharing=sharing, adapters=ADAPTERS, media=fake_media(is_whole=is_whole), proposers=proposers,
        **sizes,
    )  # fmt: skip
    run = MediaRun(engine)
    for action in actions:
        run.do(action)
    run.drain()
    run.check_every_answer()
    run.check_all_is_free()

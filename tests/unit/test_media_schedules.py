"""Random schedules of requests with and without images: every request gets the text that it gets alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from cppbatch import Media, MediaPrompt
from cppbatch.config import Sharing
from tests.support.fake_encoder import as_read, fake_media, small_picture
from tests.support.fakes import FakeProposer, fake_engine
from tests.support.randomised import randomised
from tests.unit.test_random_schedules import (
    ADAPTERS,
    LONGEST,
    MEMORIES,
    N_BATCH,
    N_CTX,
    N_PARALLEL,
    OTHERS,
    SIZES,
    Action,
    Arrive,
    Run,
    Step,
    SwitchLayout,
    arrivals,
    small_scale,  # noqa: F401  a fixture
)

BEGINNINGS: tuple[tuple[str | Media, ...], ...] = (
    ("abc", small_picture(1, 2, 2)), ("abc", small_picture(1, 2, 2)), ("", small_picture(2, 3, 2)),
    ("abcd", small_picture(1, 2, 1)),
)  # fmt: skip


@st.composite
def arrivals_with_pictures(draw: st.DrawFn) -> Arrive:
    """At most LONGEST tokens, also with separators between rows: a text, one or two images, a text.

    There are few distinct prefixes, so that requests share them in the prefix cache.
    """
    arrival = draw(arrivals())
    parts: list[str | Media] = [*draw(st.sampled_from(BEGINNINGS))]
    if draw(st.booleans()):
        parts += [draw(st.sampled_from(("", "e"))), small_picture(3, 2)]
    prompt = MediaPrompt([*parts, draw(st.sampled_from("abc"))])
    most = min(arrival.params.max_tokens or 1, LONGEST - len(as_read(prompt)))
    params = replace(arrival.params, max_tokens=most, min_tokens=min(most, arrival.params.min_tokens))
    common = draw(st.sampled_from(({}, {"cache_prompt": True, "cache_salt": "", "lora": None})))
    return Arrive([], params, {**arrival.options, **common, "picture": prompt})


@dataclass(frozen=True)
class Rest:
    """Steps until nothing is left to do."""


@dataclass
class MediaRun(Run):
    """Requests with and without images. `has_dimensions`: as in `FakeEncoder`."""

    has_dimensions: bool = False

    def do(self, action: Action | Rest) -> None:
        if isinstance(action, Rest):
            self.drain()
        elif isinstance(action, Arrive) and "picture" in action.options:
            options = {**action.options}
            prompt = options.pop("picture")
            request_id = self.engine.add_request(prompt, action.params, **options)
            read = as_read(prompt, has_dimensions=self.has_dimensions)
            self.asked[request_id] = Arrive(read, action.params, options)
            self.check_accounting()
        else:
            super().do(action)


PICTURES = st.sampled_from(("causal", "whole", "rows and columns", "rows and columns"))
"""The kinds of positions and attention masks of images."""


@randomised(
    ring=50,
    nightly=150,
    soak=20_000,
    actions=st.lists(
        st.one_of(arrivals_with_pictures(), arrivals(), *map(st.just, (Step(), Step(), Rest())), OTHERS),
        min_size=4,
        max_size=20,
    ),
    memory=MEMORIES,
    n_ctx=st.sampled_from((LONGEST, 20, 30, N_CTX)),
    sizes=SIZES,
    pictures=PICTURES,
)
def test_in_any_schedule_with_images_every_request_gets_the_text_it_gets_alone(**schedule: Any) -> None:
    run_and_check(**schedule)


@randomised(
    ring=30,
    nightly=80,
    soak=500,
    actions=st.lists(
        st.one_of(
            arrivals_with_pictures(), arrivals(), *map(st.just, (Step(), Step(), Rest(), SwitchLayout())), OTHERS
        ),
        min_size=4,
        max_size=20,
    ),
    sharing=st.sampled_from(("copy", "checkpoints", "whole", "none")),
    sizes=SIZES,
)
def test_whenever_the_layout_is_switched_images_with_rows_and_columns_stay(
    actions: list[Action | Rest], sharing: Sharing, sizes: dict[str, Any]
) -> None:
    run_and_check(actions, (False, sharing), N_CTX, {**sizes, "switches": True}, "rows and columns")


def run_and_check(
    actions: list[Action | Rest], memory: tuple[bool, Sharing], n_ctx: int, sizes: dict[str, Any], pictures: str
) -> None:
    unified, sharing = memory
    proposers = [FakeProposer()] if sizes.pop("drafts") else []
    more = 2 if sizes.get("may_pad") else 1
    has_dimensions = pictures == "rows and columns"
    engine = fake_engine(
        n_ctx=n_ctx if unified or sizes.get("switches") else N_CTX * more, n_batch=N_BATCH * more,
        n_parallel=N_PARALLEL * more, unified=unified, sharing=sharing, adapters=ADAPTERS, proposers=proposers,
        media=fake_media(is_whole=pictures == "whole", has_dimensions=has_dimensions), **sizes,
    )  # fmt: skip
    run = MediaRun(engine, has_dimensions=has_dimensions)
    for action in actions:
        run.do(action)
    run.drain()
    run.check_every_answer()
    run.check_all_is_free()

"""Every page is where the machine says: what is released can be read elsewhere, and the tail never goes."""

from __future__ import annotations

import random

import pytest

from forebay.workers.hot.residency import TAIL, Page, Pages


def pages_of(count: int, *, clean: int = 0) -> Pages:
    pages = Pages()
    for page in range(count):
        pages.append(100 + page)
    for page in range(clean):
        pages.arrive(page, page)
    return pages


def test_a_request_is_full_then_mixed_and_may_have_none() -> None:
    pages = pages_of(6, clean=6)
    assert pages.residency == "full"
    released = list(pages.releasable())
    for page in released:
        pages.release(page, findable=False)
    assert pages.residency == "mixed" and pages.held == TAIL
    cold = Pages()
    cold.append_absent()
    assert cold.residency == "none" and not cold.readable
    cold.arrive(0, 7)
    assert cold.readable and cold.state(0) is Page.ABSENT


def test_what_goes_first_is_the_end_and_never_the_tail() -> None:
    pages = pages_of(8, clean=8)
    assert list(pages.releasable()) == [5, 4, 3, 2, 1, 0]
    pages.append(300)
    assert list(pages.releasable()) == [6, 5, 4, 3, 2, 1, 0]


def test_a_page_that_host_memory_lacks_stays() -> None:
    pages = pages_of(8, clean=2)
    assert list(pages.releasable()) == [1, 0]
    with pytest.raises(AssertionError):
        pages.release(3, findable=True)


def test_a_lent_page_can_be_read_until_its_block_is_needed() -> None:
    pages = pages_of(5, clean=5)
    block = pages.release(1, findable=True)
    assert pages.state(1) is Page.LENT and pages.resident[1] == block == 101
    pages.reused(1)
    assert pages.state(1) is Page.ABSENT and pages.resident[1] == -1 and pages.readable


def test_when_host_memory_is_lost_what_was_released_is_nowhere() -> None:
    pages = pages_of(6, clean=6)
    pages.release(3, findable=False)
    pages.release(2, findable=True)
    assert pages.forget_host() == [3]
    assert pages.state(0) is Page.DIRTY and pages.state(2) is Page.LENT and not pages.readable


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_deeds_keeps_the_books(seed: int) -> None:
    rng, pages, host = random.Random(seed), Pages(), 0
    for _ in range(200):
        deed, count = rng.randrange(6), len(pages)
        if deed == 0 or not count:
            pages.append(count + 1000)
        elif deed == 1:
            lacking = [page for page in range(count) if pages.host[page] < 0]
            if lacking:
                pages.arrive(rng.choice(lacking), host)
                host += 1
        elif deed == 2:
            ready = list(pages.releasable())
            if ready:
                pages.release(rng.choice(ready), findable=rng.random() < 0.5)
        else:
            lent = [page for page in range(count) if pages.state(page) is Page.LENT]
            if lent:
                pages.reused(rng.choice(lent))
        pages.check()
        assert pages.readable

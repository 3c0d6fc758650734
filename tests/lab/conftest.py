"""The lab's image: built once, then kept in .cache/lab-debian."""

from __future__ import annotations

import pytest
from conftest import skip_for_want_of

from lab.image import Image, Unavailable, build


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return build()
    except Unavailable as reason:
        skip_for_want_of("the NUMA lab", str(reason))

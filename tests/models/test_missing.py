"""A family that is known and not served says what it would need."""

from __future__ import annotations

import pytest

from longstraw.models import family_of, supported_model_types
from longstraw.models.missing import MISSING


@pytest.mark.parametrize("model_type", MISSING)
def test_refused_with_what_is_missing(model_type: str) -> None:
    with pytest.raises(ValueError, match=rf"model_type '{model_type}' is not served yet: its .* needs"):
        family_of(model_type)


def test_what_is_served_is_not_missing() -> None:
    assert not set(MISSING) & set(supported_model_types())

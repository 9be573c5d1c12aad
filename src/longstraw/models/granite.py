"""Granite: dense decoders whose logits are divided after the head. Its other multipliers are the stock layers' own."""

from __future__ import annotations

from longstraw.models.dense import layers
from longstraw.models.family import Family, register
from longstraw.models.heads import parts_with_scaled_head

register(
    Family(
        model_types=("granite", "granitemoe", "granitemoeshared"),
        layers=layers,
        parts=parts_with_scaled_head(divisor="logits_scaling"),
    )
)

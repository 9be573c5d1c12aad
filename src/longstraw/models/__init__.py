"""Model families: one file each, found by the `model_type` of a model's text config."""

from longstraw.models.family import Family, LayerKind, family_of, supported_model_types

__all__ = ["Family", "LayerKind", "family_of", "supported_model_types"]

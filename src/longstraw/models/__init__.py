"""Model families: one file each, found by the `model_type` of a model's text config."""

from longstraw.models.family import Family, Layer, adapted, family_of, supported_model_types

__all__ = ["Family", "Layer", "adapted", "family_of", "supported_model_types"]

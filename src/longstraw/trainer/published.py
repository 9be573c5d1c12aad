"""A text model out of a checkpoint that was published as a larger class, as of one that takes images too: adapters are
trained on the text model and saved for the published class, which users and servers load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

_PEFT = "base_model.model."


@dataclass(frozen=True)
class Published:
    """Where the published class has the text model.

    Attributes:
        own: the text model's backbone, as the causal LM names it: "model".
        place: the same as the published class names it: "model.language_model".
        others: modules of the published class outside of it.
    """

    own: str
    place: str
    others: tuple[str, ...]

    @property
    def key_mapping(self) -> dict[str, str]:
        """For PEFT, which loads an adapter of the published class into the text model with it."""
        return {rf"\b{re.escape(self.place)}\.": f"{self.own}."}

    def save(self, folder: Path, model: Any) -> None:
        """Has an adapter that was just saved fit the published class, and, by `key_mapping`, the text model still."""
        file = folder / "adapter_model.safetensors"
        with safe_open(file, "pt") as opened:
            about = opened.metadata()
            tensors = {self._renamed(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        save_file(tensors, file, metadata=about)
        described = folder / "adapter_config.json"
        config = json.loads(described.read_text())
        config |= self._targets(model)
        described.write_text(json.dumps(config, indent=2, sort_keys=True))

    def _renamed(self, name: str) -> str:
        inside = name.removeprefix(f"{_PEFT}{self.own}.")
        return f"{_PEFT}{self.place}.{inside}" if inside != name else name

    def _targets(self, model: Any) -> Mapping[str, Any]:
        """Options that match the same modules in both classes, and none of the published class's others."""
        from peft.tuners.tuners_utils import check_target_module_exists

        config = model.peft_config["default"]
        pattern = isinstance(config.target_modules, str)  # of the text model's names
        named = model.base_model.targeted_module_names if pattern else config.target_modules
        # without what differs between the classes: PEFT compares ends of names
        changed: dict[str, Any] = {"target_modules": sorted(name.removeprefix(f"{self.own}.") for name in named)}
        clashing = [name for name in self.others if check_target_module_exists(config, name)]
        if clashing:
            given = config.exclude_modules or []
            if isinstance(given, str):
                changed["exclude_modules"] = "|".join([given, *map(re.escape, clashing)])
            else:
                changed["exclude_modules"] = sorted({*given, *clashing})
        return changed


def published_class(model: Any, config: Any) -> Published | None:
    """Where the class that a checkpoint's config names has the loaded model; None where it is the same class, or one
    that is not known.

    Args:
        config: as the checkpoint has it.
    """
    names = getattr(config, "architectures", None) or []
    whole_class = getattr(transformers, names[0], None) if names else None
    if whole_class is None or isinstance(model, whole_class):
        return None
    own = model.base_model_prefix
    with torch.device("meta"):
        whole = whole_class(config)
    modules = dict(whole.named_modules())
    places = [name for name, module in modules.items() if type(module) is type(getattr(model, own))]
    if len(places) != 1 or places[0] == own:
        return None
    others = tuple(name for name in modules if name and not f"{name}.".startswith(f"{places[0]}."))
    return Published(own, places[0], tuple(name for name in others if not places[0].startswith(f"{name}.")))

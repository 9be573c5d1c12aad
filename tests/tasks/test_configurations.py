"""The configurations that ship are valid, and their functions exist and accept their arguments."""

from pathlib import Path

import pytest

from longstraw import tasks
from longstraw.config.load import load_config
from longstraw.config.locate import load_function, resolve_path
from longstraw.config.train import TrainConfig
from longstraw.data.rows import read_rows

DEFAULT = Path(tasks.__file__).parent / "default.yaml"
SMOLLM2 = Path(__file__).parents[2] / "examples" / "smollm2.yaml"


@pytest.mark.parametrize("path", [DEFAULT, SMOLLM2], ids=lambda path: path.stem)
def test_configuration_is_valid(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, TrainConfig) and config.prompt_grad == "full"
    for reference in [config.dataset.source, *config.reward_funcs, *(entry.source for entry in config.eval.values())]:
        load_function(reference, "reference")


def test_default_run_trains_on_long_prompts_and_evaluates_on_others() -> None:
    config = load_config(DEFAULT)
    assert (Path(resolve_path(config.model.path, "model.path")) / "model.safetensors").is_file()
    rows = read_rows(config.dataset, "dataset")
    assert len(rows) == config.max_steps * config.prompts_per_step, "every step sees new prompts"
    assert {len(row["prompt"]) for row in rows} == {3072}
    trained_on = {tuple(row["prompt"]) for row in rows}
    for name, options in config.eval.items():
        held_out = read_rows(options, name)
        assert len(held_out) == options.num_samples
        assert not trained_on & {tuple(row["prompt"]) for row in held_out}

"""Every method takes the same gradient step: on a tiny group, against conventional autograd."""

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gate import ALLOWED, relative_error
from benchmarks.measure import Spec, measure
from benchmarks.memory import Watcher
from benchmarks.methods import METHODS
from benchmarks.workload import Workload

PIECES = {"segment_tokens": 33, "block_tokens": 14}


def gradient(path, method, workload, **options):
    model = workload.model()
    step = METHODS[method](model, **options)
    with Watcher() as watcher:
        step(workload.data(), watcher)
    save_file({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, path)
    return path, watcher


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def workload(request):
    return Workload(request.param, prompt=70, group=3, response=7)


@pytest.fixture(scope="module")
def reference(workload, tmp_path_factory):
    return gradient(tmp_path_factory.mktemp("reference") / "gradient", "conventional", workload)[0]


def test_full_is_the_conventional_gradient(workload, reference, tmp_path):
    found, watcher = gradient(tmp_path / "full", "longstraw", workload, prompt_grad="full", **PIECES)
    assert relative_error(found, reference) < ALLOWED
    assert list(watcher.phases) == ["capture", "score", "replay", "sweep"]
    assert watcher.peak_bytes > 0 and watcher.seconds > 0


def test_none_is_the_gradient_with_a_constant_prompt(workload, reference, tmp_path):
    found, watcher = gradient(tmp_path / "none", "longstraw", workload, prompt_grad="none", **PIECES)
    constant, _ = gradient(tmp_path / "constant", "constant_prompt", workload)
    assert relative_error(found, constant) < ALLOWED
    assert relative_error(found, reference) > 100 * ALLOWED  # the gate can tell the two apart
    assert list(watcher.phases) == ["capture", "score", "replay"]


@pytest.mark.parametrize("method", ["packed", "prefix_grouper", "trl"])
def test_the_others_take_the_same_step(method, tmp_path):
    pytest.importorskip({"packed": "torch"}.get(method, method))
    workload = Workload("llama", prompt=70, group=3, response=7)
    reference, _ = gradient(tmp_path / "conventional", "conventional", workload)
    found, _ = gradient(tmp_path / method, method, workload)
    assert relative_error(found, reference) < ALLOWED


def test_the_clip_holds_some_tokens_and_frees_others():
    workload = Workload("llama", prompt=20, group=4, response=40)
    group = workload.data()
    model = workload.model()
    held = 0
    for index, response in enumerate(group.responses):
        ids = torch.cat([group.prompt, response])[None, :-1]
        with torch.no_grad():
            logps = model(ids, logits_to_keep=40).logits[0].log_softmax(-1).gather(-1, response[:, None])[:, 0]
        logps.requires_grad_()
        group.loss(index, logps).backward()
        held += int((logps.grad == 0).sum())
    assert 0.05 < held / group.num_tokens < 0.95


def test_a_process_of_its_own(tmp_path):
    workload = Workload("llama", prompt=70, group=2, response=16)
    spec = Spec("longstraw", workload, {"prompt_grad": "none", **PIECES}, tmp_path / "gradient")
    row = measure(spec)
    assert row["peak_bytes"] > 0 and row["seconds"] > 0 and (tmp_path / "gradient").exists()


def test_bad_workloads_are_named():
    with pytest.raises(ValueError, match="family='gpt'"):
        Workload("gpt")
    with pytest.raises(ValueError, match="group=1"):
        Workload(group=1)

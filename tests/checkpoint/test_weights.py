"""`weights=`: what a folder, a mapping or the modules' initialisers give to a model without memory, beside what
transformers and torch make of the same."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import logging

from tests.checkpoint import models
from tests.checkpoint.models import different, language_pipe, on_meta, plain, plain_pipe, tensors, tokens
from zbfx.checkpoint.weights import fill
from zbfx.errors import ZbfxError
from zbfx.modes import Modes
from zbfx.trace.guard import Guard, Source

pytestmark = pytest.mark.transformers

logging.disable_progress_bar()


def folder_of(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def filled(
    make: Callable[[], nn.Module], weights: Any, used: Collection[str] | None = None, seed: int = 0
) -> nn.Module:
    """A model without memory, filled as a rank that uses these names fills it; by default all."""
    model = on_meta(make)
    fill_model(model, weights, used, seed)
    return model


def fill_model(model: nn.Module, weights: Any, used: Collection[str] | None = None, seed: int = 0) -> None:
    source = Source(model, None, Guard.of(model, None), Modes.now())
    used = source.tensors.keys() - {"unread"} if used is None else used
    fill(source, weights, used, (), torch.device("cpu"), seed)


@pytest.mark.parametrize("make", [models.tied_llama, models.mixtral])
def test_folder_is_read_as_transformers_reads_it(make: Callable[[], Any], tmp_path: Path) -> None:
    """With an index and several files; all tensors, and losses, are those of from_pretrained."""
    torch.manual_seed(0)
    folder = folder_of(make(), tmp_path, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = on_meta(make)
    step = language_pipe(model, 3).run_local(weights=folder)
    expected = type(model).from_pretrained(folder).train()  # type: ignore[attr-defined]
    assert different(tensors(model), tensors(expected)) == []
    ids = tokens(4)
    losses = [expected(input_ids=part, labels=part).loss for part in ids.chunk(2)]
    torch.testing.assert_close(step(input_ids=ids, labels=ids), torch.stack(losses).mean())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [models.tied_llama, models.mixtral])
def test_base_model_of_adapters_is_read(make: Callable[[], Any], tmp_path: Path) -> None:
    """Its files know nothing of adapters. These start as peft lets them, alike on all ranks; a rank reads its part."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    folder = folder_of(make(), tmp_path)

    def adapted(**options: Any) -> Any:
        return peft.get_peft_model(make(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **options))

    model: Any = filled(adapted, folder)
    values = tensors(model)
    base: Any = model.unload()
    assert different(tensors(base), tensors(make().from_pretrained(folder))) == []
    for name, value in values.items():
        if "lora_A" in name:  # kaiming_uniform with a = sqrt(5)
            assert 0.8 * value.shape[1] ** -0.5 < value.abs().max() <= value.shape[1] ** -0.5
        assert ("lora_B" in name) <= (value.count_nonzero() == 0)
    part = {name for name in values if ".layers.1." in name}
    alone = tensors(filled(adapted, folder, part))
    assert {name for name, value in alone.items() if not value.is_meta} >= part
    assert all(value.is_meta or torch.equal(value, values[name]) for name, value in alone.items())
    random = tensors(filled(lambda: adapted(init_lora_weights=False), folder))
    for name, value in random.items():
        if "lora_" in name:  # as a new nn.Linear
            assert 0.8 * value.shape[1] ** -0.5 < value.abs().max() <= value.shape[1] ** -0.5
    with pytest.raises(ZbfxError, match=r"weights= fills LoRA alone; found .*o_proj among modules_to_save"):
        filled(lambda: adapted(modules_to_save=["o_proj"]), folder)
    model = on_meta(adapted)
    model.peft_config["default"].init_lora_weights = "olora"
    with pytest.raises(ZbfxError, match="init_lora_weights='olora' needs the values of the base"):
        fill_model(model, folder)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_alone_are_no_base_model(tmp_path: Path) -> None:
    """What `save_pretrained` of a model of peft writes: training would go on from a base model of initial values."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        return peft.get_peft_model(models.tied_llama(), peft.LoraConfig(target_modules=["q_proj"], r=4))

    adapted().save_pretrained(tmp_path)
    with pytest.raises(ZbfxError, match=r"found adapters, such as base_model\.model\.model\.layers\.0"):
        filled(adapted, tmp_path)


def test_parameter_keeps_its_dtype(tmp_path: Path) -> None:
    folder = folder_of(models.tied_llama(), tmp_path)
    model = filled(lambda: models.tied_llama().bfloat16(), folder)
    expected = type(model).from_pretrained(folder, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    parameters = dict(model.named_parameters())
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
    assert all(torch.equal(p, parameters[name]) for name, p in expected.named_parameters())


def stored_forms(state: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    save_file(dict(state), path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other processes
        dcp.save({"model": dict(state)}, checkpoint_id=path / "dcp")
    file = path / "model.safetensors"
    return {"mapping": dict(state), "folder": path, "file": str(file), "dcp": path / "dcp"}


@pytest.mark.parametrize("form", ["mapping", "folder", "file", "dcp"])
def test_plain_model_is_filled_by_name(form: str, tmp_path: Path) -> None:
    """One name of a tied weight is enough; tables that no file has are computed by their modules."""
    torch.manual_seed(0)
    expected = plain()
    state = {name: t for name, t in expected.state_dict().items() if name != "7.weight"}
    weights = stored_forms(state, tmp_path)[form]
    model = on_meta(plain)
    before = dict(model.named_parameters())
    plain_pipe(model, 2).run_local(weights=weights)
    assert different(tensors(model), tensors(expected)) == []
    assert all(p is before[name] for name, p in model.named_parameters()), "the same objects, for optimizers"
    assert model[7].weight is model[0].weight  # type: ignore[index]


def test_mapping_is_not_trained() -> None:
    """Nor does a model that has memory lose it."""
    torch.manual_seed(0)
    state = plain().state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    torch.manual_seed(1)
    model = plain()
    step = plain_pipe(model, 2).run_local(weights=state)
    assert different(dict(model.state_dict()), before) == []
    step(torch.ones(4, 6), torch.zeros(4, 6))
    torch.optim.SGD(step.parameters(), lr=1.0).step()
    assert different(dict(state), before) == []
    assert different(dict(model.state_dict()), before) != []


def refusal(make: Callable[[], nn.Module], weights: Any) -> str:
    with pytest.raises(ZbfxError) as refused:
        filled(make, weights)
    return str(refused.value)


def test_names_and_shapes_that_do_not_fit_are_refused() -> None:
    state = plain().state_dict()
    without = {name: t for name, t in state.items() if name != "4.bias"}
    surplus = without | {"9.bias": state["4.bias"]}
    assert "missing are 4.bias, and no part of the model are 9.bias" in refusal(plain, surplus)
    assert "4.bias has shape (5,), the model's has (6,)" in refusal(plain, state | {"4.bias": torch.zeros(5)})
    assert "4.bias is stored as torch.int8" in refusal(plain, state | {"4.bias": torch.zeros(6, dtype=torch.int8)})
    untied = state | {"7.weight": state["0.weight"] + 1}
    assert "0.weight and 7.weight are one tensor in the model" in refusal(plain, untied)


def test_what_is_no_weights_is_refused(tmp_path: Path) -> None:
    assert "'nowhere', which does not exist here" in refusal(plain, "nowhere")
    assert "found int 3" in refusal(plain, 3)
    assert "maps names to tensors" in refusal(plain, {"0.bias": 1.0})
    assert "no *.safetensors" in refusal(plain, tmp_path)
    torch.save(plain().state_dict(), tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin. Files that are pickles are not read" in refusal(plain, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert "one.safetensors" in refusal(plain, tmp_path)
    (tmp_path / "one.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nothing of the kind")
    assert "one.safetensors is damaged" in refusal(plain, tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Harmful.path),)

    path: Path


def test_table_of_contents_runs_no_code(tmp_path: Path) -> None:
    Harmful.path = tmp_path / "was here"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    assert "mkdir is no record of a table of contents" in refusal(plain, tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "found dict" in refusal(plain, tmp_path)
    assert not Harmful.path.exists()


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = stored_forms(plain().state_dict() | {"7.weight": torch.ones(6, 6)}, tmp_path)["dcp"]
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:3000])
    assert "is damaged, or files are missing from it" in refusal(plain, folder)


def test_transformers_model_reports_as_from_pretrained(tmp_path: Path) -> None:
    """What is missing is initialised, what is no part of the model left out: both with a warning by name."""
    folder = folder_of(models.gpt2(), tmp_path)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("h.1.mlp.c_fc.weight"))
    save_file(
        {n: t for n, t in state.items() if n != name} | {"head.weight": torch.ones(2)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.warns(UserWarning, match="weights") as told:
        model = filled(models.gpt2, folder)
    texts = " ".join(str(warning.message) for warning in told)
    assert "no weights were found for transformer.h.1.mlp.c_fc.weight, which start from initial values" in texts
    assert "no part of GPT2LMHeadModel were left out: head.weight" in texts
    assert 0.01 < tensors(model)["transformer.h.1.mlp.c_fc.weight"].std() < 0.03, "initializer_range is 0.02"
    save_file(state | {name: torch.ones(3, 3)}, folder / "model.safetensors", {"format": "pt"})
    assert "h.1.mlp.c_fc.weight has shape (3, 3), the model's has (16, 64)" in refusal(models.gpt2, folder)


def test_quantized_transformers_model_is_refused(tmp_path: Path) -> None:
    folder = folder_of(models.gpt2(), tmp_path)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("h.1.mlp.c_fc.weight"))
    save_file(state | {name: state[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})
    assert "is stored as F8_E4M3" in refusal(models.gpt2, folder)

    def quantized() -> nn.Module:
        model = models.gpt2()
        model.config.quantization_config = {"quant_method": "fp8"}
        return model

    assert "quantization_config" in refusal(quantized, folder)


@pytest.mark.parametrize("make", [plain, models.tied_llama, models.mixtral])
def test_initial_values_depend_on_the_seed_alone(make: Callable[[], nn.Module]) -> None:
    """And not on what else a rank has."""
    whole, other = tensors(filled(make, "init", seed=3)), tensors(filled(make, "init", seed=4))
    assert len(different(whole, other)) > 3
    names = [name for name, _ in on_meta(make).named_parameters() if name != "unread"]
    for rank in range(2):
        part = tensors(filled(make, "init", names[rank::2], seed=3))
        found = {name: t for name, t in part.items() if not t.is_meta}
        assert set(names[rank::2]) <= set(found)
        assert different(found, {name: whole[name] for name in found}) == []


def test_initial_values_are_those_of_the_modules() -> None:
    """In distribution: bounds of nn.Linear, deviations of transformers, tables in all bits."""
    wide = on_meta(lambda: nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400), nn.Embedding(300, 400)))
    fill_model(wide, "init", {*dict(wide.named_parameters()), "1.running_var"})
    found = tensors(wide)
    assert found["0.weight"].abs().max() <= 0.05, "1 / sqrt(inputs)"
    assert abs(float(found["0.weight"].std()) - 0.05 / 3**0.5) < 2e-4
    assert abs(float(found["2.weight"].std()) - 1.0) < 2e-2
    assert torch.equal(found["1.weight"], torch.ones(400))
    assert torch.equal(found["1.running_var"], torch.ones(400))
    assert found["1.running_mean"].is_meta, "nobody asked for it"
    llama = tensors(filled(models.tied_llama, "init"))
    expected = tensors(models.tied_llama())
    assert torch.equal(llama["model.rotary_emb.inv_freq"], expected["model.rotary_emb.inv_freq"])
    assert abs(float(llama["model.embed_tokens.weight"].std()) - 0.02) < 2e-3


def test_tensor_that_nothing_fills_is_refused() -> None:
    class Bare(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.register_buffer("table", torch.ones(6), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.table

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Bare(), nn.Linear(6, 6))

    for weights, empty in (("init", "1.scale, 1.table"), (make().state_dict(), "1.table")):
        with pytest.raises(ZbfxError, match=f"no weights were found for {empty}, and no initialiser"):
            filled(make, weights)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_rank_reads_its_stage_alone(tmp_path: Path) -> None:
    """Of a model 8 times as large as its stage: memory grows by the stage and the largest tensor at most."""
    width, layers = 1024, 8
    big = on_meta(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    save_file({name: torch.ones(t.shape) for name, t in big.state_dict().items()}, tmp_path / "model.safetensors")
    fill_model(big, tmp_path, {"0.bias"})  # what the first call imports
    before = anonymous_bytes()
    fill_model(big, tmp_path, {"3.weight", "3.bias"})
    stage_bytes = sum(t.nbytes for t in big.get_submodule("3").parameters())
    assert anonymous_bytes() - before < 2.0 * stage_bytes, "the stage is one layer here, and so is the largest tensor"
    assert [name for name, t in tensors(big).items() if not t.is_meta] == ["0.bias", "3.weight", "3.bias"]

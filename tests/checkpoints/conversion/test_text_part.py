"""The text part of models that take images as well: what transformers computes of text, taken out and put back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.conversion.hf_megatron import Options, hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.conversion.peft_adapters import megatron_to_peft
from rlctl.checkpoints.conversion.prepared_model import TEXT, conversion_directory, require_seen
from rlctl.checkpoints.conversion.text_model import take_text_part
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.hf.text_config import text_config
from rlctl.checkpoints.inspection import inspect
from rlctl.checkpoints.locations import NAMED
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.errors import InputError, MachineError
from rlctl.preparation.open_model import find_base, find_model, published_facts
from rlctl.settings.data import ModelConfig
from rlctl.tiny_models.text import CHAT_TEMPLATE, VOCAB_SIZE
from support.module_runs import write_module_run
from support.multimodal_models import MODELS, write_multimodal

QUICK = ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl_moe", "llama4")
TOKENS = torch.arange(3, 43).view(2, 20) * 11 % VOCAB_SIZE


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model by name, made once; nobody writes into it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_multimodal(tmp_path_factory.mktemp(name) / "model", name)
        return made[name]

    return get


@pytest.fixture
def gemma(written: Any, tmp_path: Path) -> Path:
    """A Gemma 3 that a test may change."""
    return shutil.copytree(written("gemma3"), tmp_path / "gemma")


def whole_model(directory: Path) -> Any:
    import transformers

    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(directory).eval()


def text_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    found = model(input_ids=TOKENS).logits.log_softmax(-1)
    assert found.std() > 0.5
    return found


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def change(directory: Path, file: str = "config.json", **values: Any) -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def in_one_file(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS])
def test_the_text_part_is_the_whole_model_given_text(name: str, written: Any, tmp_path: Path) -> None:
    report = take_text_part(written(name), tmp_path / "text", Options(shard_bytes=200_000))
    assert report.verified
    assert len(list((tmp_path / "text").glob("*.safetensors"))) > 1
    whole, text = whole_model(written(name)), text_model(tmp_path / "text")
    body = whole.get_decoder()
    held, own = getattr(body, "model", body).state_dict(), text.model.state_dict()
    assert held.keys() == own.keys()
    assert all(torch.equal(held[key], own[key]) for key in own)
    assert torch.equal(whole.get_output_embeddings().weight, text.get_output_embeddings().weight)
    assert torch.equal(logprobs(whole), logprobs(text))


def test_a_text_part_declares_no_layers_that_it_lacks(written: Any, tmp_path: Path) -> None:
    model, told = shutil.copytree(written("qwen3_5"), tmp_path / "model"), list[str]()
    section = json.loads((model / "config.json").read_text())["text_config"]
    change(model, text_config=section | {"mtp_num_hidden_layers": 1})
    in_one_file(model, tensors_in(model) | {"mtp.fc.weight": torch.ones(64, 128)})
    take_text_part(model, tmp_path / "text", Options(tell=told.append))
    assert told == ["without the multi-token-prediction layers, which transformers' text model does not have"]
    assert json.loads((tmp_path / "text" / "config.json").read_text())["mtp_num_hidden_layers"] == 0


@pytest.mark.parametrize(
    ("name", "section", "published"),
    [
        ("gemma3", True, {
            "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }),
        ("mistral3", True, {
            "rope_theta": 50_000.0, "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
            },
        }),
        ("qwen2_5_vl", False, {"rope_theta": 1_000_000.0}),
    ],
)  # fmt: skip
def test_older_readers_find_the_rotary_embeddings(
    name: str, section: bool, published: dict[str, Any], written: Any, tmp_path: Path
) -> None:
    """transformers 4 reads these keys alone, `rope_theta` as 10,000 where there is none: with 4.57.3 the text parts of
    a Gemma 3 and a Qwen2.5-VL have the losses of the whole models since these keys are written."""
    model = shutil.copytree(written(name), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    own = config["text_config"]
    for key in ("rope_parameters", "layer_types"):
        own.pop(key, None)
    mrope = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}} if name.startswith("qwen") else {}
    if section:
        own |= published
    else:
        config = {key: value for key, value in config.items() if key != "text_config"} | own | published | mrope
        config["model_type"] = "qwen2_5_vl"
    (model / "config.json").write_text(json.dumps(config))
    found = text_config(model)
    scaling = published.get("rope_scaling")
    assert {key: found.get(key) for key in published if key != "rope_scaling"} == {
        key: value for key, value in published.items() if key != "rope_scaling"
    }
    assert found.get("rope_scaling") == (scaling and scaling | {"type": scaling["rope_type"]})
    assert found["torch_dtype"] == found["dtype"]
    take_text_part(model, tmp_path / "text")
    assert torch.equal(logprobs(text_model(tmp_path / "text")), logprobs(whole_model(model)))


def test_values_around_the_text_section_are_the_text_models(gemma: Path) -> None:
    said = json.loads((gemma / "config.json").read_text())
    section = {k: v for k, v in said["text_config"].items() if k not in ("eos_token_id", "dtype")}
    change(gemma, text_config=section, eos_token_id=[1, 106], dtype="bfloat16", tie_word_embeddings=True)
    found = text_config(gemma)
    assert (found["architectures"], found["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert (found["eos_token_id"], found["dtype"], found["tie_word_embeddings"]) == ([1, 106], "bfloat16", True)
    assert "vision_config" not in found
    change(gemma, quantization_config={"quant_method": "gptq"})
    with pytest.raises(InputError, match="quantized in a way that rlctl does not read"):
        text_config(gemma)


def test_the_files_say_whether_embeddings_are_tied_where_nothing_else_does(written: Any, tmp_path: Path) -> None:
    model = shutil.copytree(written("mistral3"), tmp_path / "mistral")
    config = json.loads((model / "config.json").read_text())
    config.pop("tie_word_embeddings")
    config["text_config"].pop("tie_word_embeddings")
    (model / "config.json").write_text(json.dumps(config))
    assert text_config(model)["tie_word_embeddings"] is False
    in_one_file(model, {n: v for n, v in tensors_in(model).items() if "lm_head" not in n})
    assert text_config(model)["tie_word_embeddings"] is True


def test_the_chat_template_of_a_processor_is_the_tokenizers(gemma: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    change(gemma, "tokenizer_config.json", chat_template=None)
    for file in gemma.glob("chat_template*"):
        file.unlink()
    (gemma / "processor_config.json").write_text(json.dumps({"chat_template": "other"}))
    (gemma / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    take_text_part(gemma, tmp_path / "text")
    assert AutoTokenizer.from_pretrained(tmp_path / "text").chat_template == CHAT_TEMPLATE
    assert (tmp_path / "text" / "generation_config.json").is_file()
    left = {path.name for path in (tmp_path / "text").iterdir()}
    assert not left & {"preprocessor_config.json", "processor_config.json", "chat_template.json"}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda held: held.pop("language_model.model.layers.1.mlp.up_proj.weight"),
         "the text part lacks model.layers.1.mlp.up_proj.weight"),
        (lambda held: held.update({"language_model.model.layers.1.extra.weight": torch.zeros(2)}),
         "language_model.model.layers.1.extra.weight belongs to the text part, but"),
        (lambda held: held.update({"language_model.model.norm.weight": torch.zeros(2)}),
         r"language_model.model.norm.weight has shape \[2\], but config.json implies \[64\]"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(harm: Any, said: str, gemma: Path, tmp_path: Path) -> None:
    held = tensors_in(gemma)
    harm(held)
    in_one_file(gemma, held)
    with pytest.raises(InputError, match=said):
        take_text_part(gemma, tmp_path / "text")
    assert not (tmp_path / "text").exists()
    (problem,) = inspect(gemma).problems
    assert re.search(said, problem)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["NewForConditionalGeneration"], "model_type": "new"}, "knows no model type `new`"),
        ({"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v"}, "no class that writes text"),
        (
            {"architectures": ["ChameleonForConditionalGeneration"], "model_type": "chameleon"},
            "no section for",
        ),
        ({"architectures": ["Florence2ForConditionalGeneration"], "model_type": "florence2"}, "an encoder-decoder"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder-decoder"),
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "text_config": {"model_type": "bert"},
            },
            r"its text part cannot be trained: BertLMHeadModel .* its attention is not causal",
        ),
    ],
)
def test_a_model_without_a_text_part_to_train_is_refused_with_the_reason(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=said):
        published_facts(ModelConfig(name=str(tmp_path)))


def test_block_scaled_weights_keep_their_scales(written: Any, tmp_path: Path) -> None:
    model = shutil.copytree(written("mistral3"), tmp_path / "model")
    held = tensors_in(model)
    for name in [n for n in held if n.startswith("language_model") and n.endswith("_proj.weight")]:
        rows, columns = held[name].shape
        held[name] = held[name].to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = torch.rand(-(-rows // 32), -(-columns // 32)) + 0.5
    in_one_file(model, held)
    change(model, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    take_text_part(model, tmp_path / "text")
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    assert torch.equal(tensors_in(tmp_path / "text")[scale], held[f"language_model.{scale}"])
    checkpoint = tmp_path / "megatron"
    assert hf_to_megatron(tmp_path / "text", checkpoint, Options(dtype="float32")).verified
    with pytest.raises(InputError, match=r"its text part is quantized \(tensor .* is float8_e4m3fn\)"):
        megatron_to_hf(checkpoint, tmp_path / "whole", None, Options(whole=model))


@pytest.mark.guard
@pytest.mark.slow
def test_a_plan_copies_nothing_and_a_run_takes_the_text_part_out_once(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMED[0], str(tmp_path))
    model, said = written("gemma3"), list[str]()
    assert published_facts(ModelConfig(name=str(model)), said.append).family == "gemma3"
    (line,) = said
    assert "takes images or sound as well as text: its text part is trained" in line
    assert f"a run takes out once into {tmp_path / 'rlctl'} (0.0" in line
    early = find_model(str(model), copies=False)
    assert not any(tmp_path.iterdir())
    assert not any(early.directory.glob("*.safetensors"))

    first = find_model(str(model), tell=said.append)
    place = conversion_directory(model, TEXT)
    assert (first.directory, first.origin) == (place, model)
    assert said[1:] == [f"taking the text part out of {model} once, for every run to start from: {place}"]
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    open_hf_model(place)
    assert early.fingerprint() == first.fingerprint()  # so that a dry run knows the model of a run again
    assert find_model(str(model), tell=said.append) == first == find_model(str(model), copies=False)
    assert len(said) == 2
    (place / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"has been damaged since: config\.json has 2 bytes instead"):
        find_model(str(model))


def test_a_model_of_the_catalog_that_takes_images_says_so() -> None:
    said: list[str] = []
    assert published_facts(ModelConfig(name="google/gemma-3-27b-it"), said.append).layers == 62
    assert published_facts(ModelConfig(name="google/gemma-3-1b-it"), said.append).layers == 26
    (line,) = said
    assert line.startswith("google/gemma-3-27b-it takes images or sound as well as text: its text part is trained")
    assert "(54 GB); no image tokens are counted" in line
    assert "--set model.images=true" in line


def test_a_text_part_needs_room_that_every_node_sees(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    place = conversion_directory(written("gemma3"), TEXT)
    take_text_part(written("gemma3"), place)
    model = ModelFiles(place, "gemma", origin=written("gemma3"))
    require_seen(model, 1)
    with pytest.raises(MachineError, match=f"other nodes may not see {tmp_path / 'home'}") as failed:
        require_seen(model, 2)
    assert f"set {NAMED[0]} to a directory" in str(failed.value.hint)
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=1000))
    with pytest.raises(MachineError, match=r"GB free, but .* GB are needed"):
        take_text_part(written("gemma3"), tmp_path / "text")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.slow
def test_a_text_part_whose_copy_was_killed_is_made_again(gemma: Path, tmp_path: Path) -> None:
    section = json.loads((gemma / "config.json").read_text())["text_config"]
    change(gemma, text_config=section | {"vocab_size": 1_000_000})  # 0.3 GB: longer than to see that it has begun
    in_one_file(gemma, tensors_in(gemma) | {"language_model.model.embed_tokens.weight": torch.ones(1_000_000, 64)})
    place = tmp_path / "text"
    command = [sys.executable, "-m", "rlctl", "convert", "text-part", str(gemma), str(place)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob(".text.partial/*.safetensors")):
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.wait()
    assert not place.exists()
    assert take_text_part(gemma, place).verified
    assert {path.name for path in tmp_path.iterdir()} == {"gemma", "text"}


def trained(text: Path, place: Path) -> Path:
    """A Megatron checkpoint of the text model with every value changed, as by a run."""
    changed = shutil.copytree(text, place / "changed")
    (changed / "rlctl_conversion.json").unlink()
    in_one_file(changed, {name: value * 1.25 for name, value in tensors_in(text).items()})
    hf_to_megatron(changed, place / "megatron", Options(dtype="float32"))
    return place / "megatron"


@pytest.mark.parametrize("name", ["gemma3", pytest.param("mistral3", marks=pytest.mark.slow), "qwen3_vl_moe"])
def test_trained_weights_are_put_back_into_the_whole_model(name: str, written: Any, tmp_path: Path) -> None:
    take_text_part(written(name), tmp_path / "text")
    checkpoint, whole = trained(tmp_path / "text", tmp_path), tmp_path / "whole"
    assert megatron_to_hf(checkpoint, whole, None, Options(whole=written(name))).verified
    before, after = tensors_in(written(name)), tensors_in(whole)
    text = {n for n in before if not any(word in n for word in ("vision", "visual", "multi_modal"))}
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value * 1.25 if key in text else value), key
    for path in written(name).iterdir():
        if path.suffix != ".safetensors":
            assert (whole / path.name).read_bytes() == path.read_bytes()
    assert torch.equal(logprobs(whole_model(whole)), logprobs(text_model(tmp_path / "changed")))


def test_a_whole_model_keeps_its_precisions_and_a_second_copy_of_the_embedding(gemma: Path, tmp_path: Path) -> None:
    held = {name: value.bfloat16() for name, value in tensors_in(gemma).items()}
    held["language_model.model.norm.weight"] = held["language_model.model.norm.weight"].float()
    held["language_model.lm_head.weight"] = held["language_model.model.embed_tokens.weight"].clone()
    in_one_file(gemma, held)
    copies = ("consolidated.safetensors", "consolidated.safetensors.index.json", "pytorch_model.bin", "model.gguf")
    for name in copies:  # they hold what the weights were before training
        (gemma / name).write_bytes(b"old")
    (gemma / "params.json").write_text("{}")
    take_text_part(gemma, tmp_path / "text")
    megatron_to_hf(trained(tmp_path / "text", tmp_path), tmp_path / "whole", None, Options(whole=gemma))
    found = tensors_in(tmp_path / "whole")
    left = {path.name for path in (tmp_path / "whole").iterdir()}
    assert "params.json" in left
    assert not left & set(copies)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in held.items()}
    embedding = found["language_model.model.embed_tokens.weight"]
    assert torch.equal(found["language_model.lm_head.weight"], embedding)
    assert torch.equal(embedding, held["language_model.model.embed_tokens.weight"] * 1.25)


def test_weights_are_put_into_no_other_model(written: Any, tmp_path: Path) -> None:
    take_text_part(written("gemma3"), tmp_path / "text")
    checkpoint = trained(tmp_path / "text", tmp_path)
    with pytest.raises(InputError, match=r"its text part is another model than this one, by lm_head\.weight"):
        megatron_to_hf(checkpoint, tmp_path / "whole", None, Options(whole=written("mistral3")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("gemma3", marks=pytest.mark.guard), "qwen2_5_vl", "qwen3_vl_moe", "llama4"]
)
def test_adapters_of_a_text_part_go_back_into_both_models(name: str, written: Any, tmp_path: Path) -> None:
    """The truth is transformers' whole model with alpha / r B A added to the linear layers of its text part."""
    whole, place = written(name), tmp_path / "text"
    take_text_part(whole, place)
    run, pairs = adapter_run(ModelFiles(place, str(whole), origin=whole), tmp_path / "run", str(whole))
    assert megatron_to_hf(run, tmp_path / "merged").verified
    megatron_to_peft(run, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(whole)
    adapter, model = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), whole_model(whole)
    for key in [key for key in adapter if key.endswith("lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert {module, module.rpartition(".")[2]} & {*config["target_modules"]}
        model.get_submodule(module).weight.data += 2.0 * adapter[key.replace("lora_A", "lora_B")] @ adapter[key]
    assert len(adapter) == 2 * len(pairs) > 0
    changed = logprobs(model)
    torch.testing.assert_close(logprobs(text_model(tmp_path / "merged")), changed, atol=1e-4, rtol=0)
    assert (changed - logprobs(whole_model(whole))).abs().max() > 0.1
    shutil.rmtree(place)  # the cache of conversions was emptied
    with pytest.raises(InputError, match=r"began with is not at .*text any more"):
        megatron_to_hf(run, tmp_path / "again")
    found = find_base(str(whole), run, lambda line: None)
    assert megatron_to_hf(run, tmp_path / "again", found).verified
    assert all(
        torch.equal(value, tensors_in(tmp_path / "merged")[key])
        for key, value in tensors_in(tmp_path / "again").items()
    )
    megatron_to_hf(run, tmp_path / "back", found, Options(whole=whole))
    torch.testing.assert_close(logprobs(whole_model(tmp_path / "back")), changed, atol=1e-4, rtol=0)


def adapter_run(base: ModelFiles, run: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Write the checkpoint of a run on the backend dtensor with random adapters of rank 2 and alpha 4."""
    from torch import nn

    generator, held, layers = torch.Generator().manual_seed(0), dict[str, torch.Tensor](), dict[str, Any]()
    for module, layer in text_model(base.directory).named_modules():
        if type(layer) is nn.Linear and ".layers." in module:
            layers[module] = layer
            held[f"{module}.lora_a"] = torch.randn(2, layer.in_features, generator=generator) * 0.3
            held[f"{module}.lora_b"] = torch.randn(layer.out_features, 2, generator=generator) * 0.3
    lora = {"training__lora__rank": 2, "training__lora__alpha": 4.0}
    return write_module_run(run, base, held, model__name=name, **lora), layers

"""Chat templates, the plain format, and the tokens that end a completion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from rlctl.checkpoints.hf import hub
from rlctl.data.chat import PLAIN_STOP, PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig, ModelConfig

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + DEFAULT_SYSTEM
)


IN_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def row(prompt: str | list[dict[str, str]] = "2 + 3?") -> PromptRow:
    return PromptRow(0, "d.jsonl, line 1", prompt, "5")


def encoder(directory: Path, model: ModelConfig | None = None, **data: str) -> PromptEncoder:
    model = model or ModelConfig()
    return PromptEncoder.build(load_tokenizer(directory, model), model, DataConfig(**data), directory)


@pytest.fixture(scope="session")
def base_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without its chat template."""
    directory = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(tiny_llama, directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    return directory


def test_a_prompt_is_what_the_tokenizer_s_template_makes(tiny_llama: Path) -> None:
    made = encoder(tiny_llama)
    tokenizer = load_tokenizer(tiny_llama, ModelConfig())
    messages = [{"role": "user", "content": "2 + 3?"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(made.encode(row())) == list(expected)
    assert made.text(row()) == "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert (made.stop, made.note) == ((), None)


def test_a_token_that_the_model_lacks_is_named_before_anything_starts(tiny_llama: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    with pytest.raises(InputError, match=r"line 1: the prompt becomes token .* and the model has 20\..*--tokenizer"):
        encoder(directory).encode(row())


def test_a_template_that_fails_or_cannot_be_read_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    for content, words in ((b"{{ 1 / 0 }}", "division by zero"), (b"\xff\xfe{{", "not a UTF-8 text")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=words):
            encoder(tiny_llama, ModelConfig(chat_template=str(path)))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer_config.json", "[]", "no tokenizer that can be loaded"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "tokenizer.json is a pointer of Git LFS"),
        ("config.json", None, "no tokenizer that can be loaded"),
    ],
)
def test_damaged_files_beside_a_tokenizer_are_named(
    tiny_llama: Path, tmp_path: Path, file: str, text: str | None, words: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / file).write_text(text if text is not None else json.dumps(config | {"num_attention_heads": 3}))
    with pytest.raises(InputError, match=words):
        encoder(directory)


def test_system_prompt_and_suffix(tiny_llama: Path) -> None:
    made = encoder(tiny_llama, system_prompt="Be brief.", prompt_suffix=" Answer with a number.")
    assert made.text(row()) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3? Answer with a number.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_prompt_template_has_text_on_both_sides_and_braces_of_its_own(tiny_llama: Path) -> None:
    made = encoder(tiny_llama, prompt_template="In \\boxed{}:\n{prompt}\nBegin.", prompt_suffix="!")
    assert made.text(row()) == "<|im_start|>user\nIn \\boxed{}:\n2 + 3?\nBegin.!<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_template_names_columns_and_replaces_the_last_message(tiny_llama: Path) -> None:
    made = encoder(tiny_llama, prompt_template="{hint}: {prompt}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages += [{"role": "user", "content": "2 + 3?"}]
    filled = PromptRow(0, "d.jsonl, line 1", messages, "5", {"hint": "Add"})
    assert made.text(filled).endswith("b<|im_end|>\n<|im_start|>user\nAdd: 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(InputError, match=r"no column 'hint' .*data\.prompt_template=\{prompt\} takes it as it is"):
        made.text(row())


def test_a_row_s_own_system_message_stays(tiny_llama: Path) -> None:
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "q"}]
    text = encoder(tiny_llama, system_prompt="Theirs.", prompt_suffix="!").text(row(messages))
    assert "Mine." in text
    assert "Theirs." not in text
    assert "q!" in text
    assert messages[1]["content"] == "q"


def test_an_empty_system_prompt_displaces_the_template_s_own(tiny_llama: Path) -> None:
    model = ModelConfig(chat_template=DEFAULT_SYSTEM)
    assert "You help." in encoder(tiny_llama, model).text(row())
    assert "You help." not in encoder(tiny_llama, model, system_prompt="").text(row())


def test_an_empty_system_prompt_adds_nothing_where_the_template_has_none(tiny_llama: Path) -> None:
    assert encoder(tiny_llama, system_prompt="").text(row()) == encoder(tiny_llama).text(row())


def test_a_base_model_gets_questions_and_answers_with_a_stop_and_is_told_of(base_model: Path) -> None:
    made = encoder(base_model, system_prompt="Add.")
    assert made.text(row()) == "Add.\nQuestion: 2 + 3?\nAnswer:"
    assert made.stop == (PLAIN_STOP,)
    assert "no chat template" in made.note
    assert list(made.encode(row())) == made.tokenizer.encode(made.text(row()))


def test_the_template_can_be_given_as_file_or_text(base_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(DEFAULT_SYSTEM)
    from_file = encoder(base_model, ModelConfig(chat_template=str(path)))
    from_text = encoder(base_model, ModelConfig(chat_template=DEFAULT_SYSTEM))
    assert from_file.text(row()) == from_text.text(row())
    assert "You help." in from_file.text(row())
    assert from_file.note is None


def test_the_tokenizer_can_be_another_model_s(base_model: Path, tiny_llama: Path) -> None:
    made = encoder(base_model, ModelConfig(tokenizer=str(tiny_llama)))
    assert made.text(row()).startswith("<|im_start|>user")


@pytest.mark.parametrize("cached", [False, True])
def test_a_tokenizer_is_looked_for_on_the_hub_once(
    cached: bool, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache has nothing of its name, the cache is not asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if cached:
        (tmp_path / "models--nowhere").mkdir()
    asked: list[dict[str, Any]] = []

    def unreachable(name: str, **settings: Any) -> str:
        asked.append(settings)
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub._State, "asked_at", None)
    monkeypatch.setattr(hub, "_unreached", lambda _: "")
    with pytest.raises(InputError, match="--tokenizer nowhere: no directory here, not in the Hugging Face cache"):
        load_tokenizer(tiny_llama, ModelConfig(tokenizer="nowhere"))
    assert [bool(settings.get("local_files_only")) for settings in asked] == [True, False][not cached :]


def test_a_tokenizer_alone_is_found_in_the_cache(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "models--owner--tokenizer", "a" * 40
    cached = Path(shutil.copytree(tiny_llama, folder / "snapshots" / commit))
    (cached / "config.json").unlink()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    made = encoder(tiny_llama, ModelConfig(tokenizer="owner/tokenizer"))
    assert made.text(row()).startswith("<|im_start|>user")


def test_end_tokens_are_the_model_s_the_tokenizer_s_and_the_template_s(tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    tokenizer = load_tokenizer(directory, ModelConfig())
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encoder(directory).stop_token_ids == tuple(sorted({0, 7, tokenizer.eos_token_id, end_of_turn}))


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] ", "{% for %}", "{{ raise_exception('no') }}"])
def test_a_template_that_does_not_render_is_refused_at_once(tiny_llama: Path, template: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        encoder(tiny_llama, ModelConfig(chat_template=template))


@pytest.mark.parametrize("template", ["Answer.", "{{ messages[0]['role'] }}"])
def test_a_template_that_leaves_the_prompt_out_is_refused(tiny_llama: Path, template: str) -> None:
    with pytest.raises(InputError, match="drops user messages"):
        encoder(tiny_llama, ModelConfig(chat_template="{{ '' }}" + template))


def test_a_template_that_takes_content_in_parts_is_given_parts(tiny_llama: Path) -> None:
    """As those of models that take images do; with a text in their place nothing would be written."""
    made = encoder(tiny_llama, ModelConfig(chat_template=IN_PARTS), system_prompt="Add.")
    plain = encoder(tiny_llama, ModelConfig(chat_template=DEFAULT_SYSTEM), system_prompt="Add.")
    assert made.text(row()) == plain.text(row())
    assert made.stop_token_ids == plain.stop_token_ids


def test_a_template_is_given_its_variables(tiny_llama: Path) -> None:
    template = "{{ messages[-1]['content'] }}{% if thinks is defined and not thinks %} Do not think.{% endif %}"
    plain = encoder(tiny_llama, ModelConfig(chat_template=template))
    told = encoder(tiny_llama, ModelConfig(chat_template=template, chat_template_kwargs={"thinks": False}))
    assert told.text(row()) == plain.text(row()) + " Do not think."


def test_a_template_without_system_role_is_refused_with_a_system_prompt(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match=r"No system role.*data\.system_prompt"):
        encoder(tiny_llama, ModelConfig(chat_template=NO_SYSTEM), system_prompt="Be brief.")


def test_a_missing_template_file_is_named(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match=r"--chat-template chat\.jinja: no such file"):
        encoder(tiny_llama, ModelConfig(chat_template="chat.jinja"))


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"--tokenizer .*empty has no tokenizer"):
        load_tokenizer(tmp_path, ModelConfig(tokenizer=str(tmp_path / "empty")))

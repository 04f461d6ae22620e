"""The forms in which published families write a conversation, as short templates with their special tokens: who
speaks, what ends an answer, and how the result of a tool is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlctl.tiny_models.text import write_tiny_family


def chat(*, user: str, assistant: str, begin: str, tool: str | None, first: str = "", tools: str = "") -> str:
    """A template of one text for each role; `tool` None: there is no such role. A system message is as a user's."""
    told = "{{ raise_exception('Only users and assistants speak.') }}" if tool is None else tool
    return (
        first
        + ("{% if tools %}" + tools + "{{ tools | tojson }}{% endif %}" if tools else "")
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + assistant
        + "{% elif m.role == 'tool' %}"
        + told
        + "{% else %}"
        + user
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + begin
        + "{% endif %}"
    )


SAID = "{{ m.content }}"
HERMES = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
CHATML: dict[str, Any] = {
    "user": "<|im_start|>{{ m.role }}\n" + SAID + "<|im_end|>\n",
    "begin": "<|im_start|>assistant\n",
    "tool": "<|im_start|>user\n<tool_response>\n" + SAID + "\n</tool_response><|im_end|>\n",
    "tools": "<|im_start|>system\n",
}
BAR = "\uff5c"
"""The fullwidth bar of DeepSeek's special tokens."""
FORMATS = {
    "llama3": chat(
        first="<|begin_of_text|>",
        user="<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n" + SAID + "<|eot_id|>",
        assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{% if m.tool_calls %}"
        "{% set c = m.tool_calls[0].function %}"
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% else %}' + SAID + "{% endif %}<|eot_id|>",
        begin="<|start_header_id|>assistant<|end_header_id|>\n\n",
        tool="<|start_header_id|>ipython<|end_header_id|>\n\n" + SAID + "<|eot_id|>",
        tools="<|start_header_id|>system<|end_header_id|>\n\n",
    ),
    "qwen2.5": chat(**CHATML, assistant="<|im_start|>assistant\n" + SAID + HERMES + "<|im_end|>\n"),
    "qwen3": chat(
        **CHATML | {"begin": "<|im_start|>assistant\n<think>\n\n</think>\n\n"},
        assistant="<|im_start|>assistant\n{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
        + HERMES
        + "<|im_end|>\n",
    ),
    "smollm2": chat(
        **CHATML | {"tools": "", "tool": CHATML["user"]}, assistant="<|im_start|>assistant\n" + SAID + "<|im_end|>\n"
    ),
    "gemma3": chat(
        first="<bos>",
        user="<start_of_turn>user\n" + SAID + "<end_of_turn>\n",
        assistant="<start_of_turn>model\n" + SAID + "<end_of_turn>\n",
        begin="<start_of_turn>model\n",
        tool=None,
    ),
    "gemma4": chat(  # calls and their results stand in one turn of the model
        user="<|turn>{{ m.role }}\n" + SAID + "<turn|>\n",
        assistant="{% if messages[loop.index0 - 1].role != 'tool' %}<|turn>model\n{% endif %}"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name ~ '{' }}"
        "{% for key, value in c.function.arguments.items() %}{{ key }}:{{ value | tojson }}{% endfor %}}<tool_call|>"
        "{% endfor %}{% if m.tool_calls %}<|tool_response>{% else %}" + SAID + "<turn|>\n{% endif %}",
        begin="{% if messages[-1].role != 'tool' %}<|turn>model\n{% endif %}",
        tool='response:{{ m.name }}{value:<|"|>' + SAID + '<|"|>}<tool_response|>',
        tools="<|turn>system\n",
    ),
    "deepseek": chat(
        first=f"<{BAR}begin▁of▁sentence{BAR}>",
        user=f"<{BAR}User{BAR}>" + SAID,
        assistant=f"<{BAR}Assistant{BAR}>" + SAID + "{% for c in m.tool_calls or [] %}"
        f"<{BAR}tool▁call▁begin{BAR}>" + "{{ c.function.name }}" + f"<{BAR}tool▁sep{BAR}>"
        "{{ c.function.arguments | tojson }}" + f"<{BAR}tool▁call▁end{BAR}>" + "{% endfor %}"
        f"<{BAR}end▁of▁sentence{BAR}>",
        begin=f"<{BAR}Assistant{BAR}>",
        tool=f"<{BAR}tool▁output▁begin{BAR}>" + SAID + f"<{BAR}tool▁output▁end{BAR}>",
        tools=f"<{BAR}User{BAR}>",
    ),
    "gpt-oss": chat(
        user="<|start|>{{ m.role }}<|message|>" + SAID + "<|end|>",
        assistant="{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
        "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}"
        "<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>" + SAID + "<|end|>{% endif %}",
        begin="<|start|>assistant",
        tool="<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>" + SAID + "<|end|>",
        tools="<|start|>developer<|message|>",
    ),
}
SPECIAL = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>",
    "<end_of_turn>", *(f"<{BAR}{name}{BAR}>" for name in (
        "begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁call▁begin", "tool▁sep", "tool▁call▁end",
        "tool▁output▁begin", "tool▁output▁end",
    )), "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>",
)  # fmt: skip
"""Special tokens of these families that the tiny models' tokenizer lacks."""


def write_of_formats(directory: Path, special: tuple[str, ...] = SPECIAL) -> Path:
    """Write a tiny Llama whose tokenizer has the special tokens of all these families."""
    from transformers import AutoTokenizer

    write_tiny_family(directory, vocab_size=512 + len(special))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.save_pretrained(directory)
    return directory


def calling(written: str, between: str = "", before: str = "", after: str = "") -> str:
    """A template whose answers call tools; `written`: one call `c`, with its function `f`."""
    loop = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + written
    loop += "{% if not loop.last %}" + between + "{% endif %}{% endfor %}"
    calls = "{% if m.tool_calls %}" + before + loop + after + "{% endif %}"
    return chat(**CHATML, assistant="<|im_start|>assistant\n" + SAID + calls + "<|im_end|>\n")


JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
FILLED = "{% for key, value in f.arguments.items() %}{% set shown = value if value is string else value | tojson %}"
IN_PYTHON = "{% for key, value in f.arguments.items() %}{% set shown = value %}"
DSML = BAR + "DSML" + BAR
CALLS = {
    "hermes": calling("\n<tool_call>\n" + JSON_CALL + "\n</tool_call>"),
    "llama": calling('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; "),
    "mistral": calling("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"),
    "mistral of lists": calling(JSON_CALL, ", ", "[TOOL_CALLS][", "]"),
    "deepseek": calling(
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>"
        "{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
        f"<{BAR}tool▁call▁end{BAR}>",
        before=f"<{BAR}tool▁calls▁begin{BAR}>",
        after=f"<{BAR}tool▁calls▁end{BAR}>",
    ),
    "deepseek-v3.2": calling(
        f'<{DSML}invoke name="' + '{{ f.name }}">\n' + FILLED + f'<{DSML}parameter name="'
        '{{ key }}" string="{{ (value is string) | tojson }}">{{ shown }}' + f"</{DSML}parameter>\n"
        "{% endfor %}" + f"</{DSML}invoke>\n",
        before=f"\n\n<{DSML}function_calls>\n",
        after=f"</{DSML}function_calls>",
    ),
    "gpt-oss": calling(
        "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}<|call|>"
    ),
    "qwen3-coder": calling(
        "\n<tool_call>\n<function={{ f.name }}>\n" + IN_PYTHON + "<parameter={{ key }}>\n"
        "{{ shown | tojson if shown is mapping or shown is sequence and shown is not string else shown }}"
        "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "glm": calling(
        "\n<tool_call>{{ f.name }}\n" + FILLED + "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ shown }}</arg_value>\n"
        "{% endfor %}</tool_call>"
    ),
    "kimi-k2": calling(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "minimax-m1": calling(JSON_CALL + "\n", before="<tool_calls>\n", after="</tool_calls>"),
    "minimax-m2": calling(
        '<invoke name="{{ f.name }}">\n' + FILLED + '<parameter name="{{ key }}">{{ shown }}</parameter>\n'
        "{% endfor %}</invoke>\n",
        before="\n\n<minimax:tool_call>\n",
        after="</minimax:tool_call>",
    ),
    "seed-oss": calling(
        "\n<seed:tool_call>\n<function={{ f.name }}>\n" + IN_PYTHON + "<parameter={{ key }}>{{ shown }}</parameter>\n"
        "{% endfor %}</function>\n</seed:tool_call>"
    ),
    "gemma4": calling(  # of values that are not themselves objects or lists
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for key, value in f.arguments.items() %}{{ key }}:"
        '{% if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value | tojson }}{% endif %}'
        "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>"
    ),
    "granite": calling(JSON_CALL, ", ", "<|tool_call|>[", "]"),
    "phi4": calling(JSON_CALL, ", ", "functools[", "]"),
    "phi4 with tags": calling("<|tool_call|>" + JSON_CALL + "<|/tool_call|>"),
    "nemotron-v2": calling(JSON_CALL, ", ", "<TOOLCALL>[", "]</TOOLCALL>"),
    "cohere": calling(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        ",\n",
        "<|START_ACTION|>[\n",
        "\n]<|END_ACTION|>",
    ),
    "pythonic": calling(
        "{{ f.name }}({% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        ", ",
        "<|python_start|>[",
        "]<|python_end|>",
    ),
}
"""Templates that write calls in each format that published models have, by its name; a word behind it tells two ways of
one format apart."""

"""Chat templates in the forms that well-known models use: facts of those forms, in our own words.

Each has the markers, spaces, line ends and refusals of its model's stock template, and none of its
text. ``special`` are the tokens of its tokenizer that are special; ``plain`` those that are tokens
and not special.
"""

# ruff: noqa: E501, RUF001
from dataclasses import dataclass


@dataclass(frozen=True)
class Stock:
    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    end: str
    """What ends an answer in the text, after what may be spaces."""
    lead: str = ""
    """What the model has to write before an answer without thoughts."""
    has_system: bool = True
    has_tools: bool = False
    plain: tuple[str, ...] = ()
    is_turn_by_turn: bool = False
    """Whether the turn before the last looks otherwise once there is a later one, or has no end."""
    is_sentencepiece: bool = False


ALTERNATE = """\
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant have to take turns') }}
{%- endif %}
{%- endfor %}
"""

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
IM = ("<|im_start|>", "<|im_end|>")

QWEN_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""

QWEN_CALLS = """\
{%- for call in m.tool_calls or [] %}
{%- set f = call.function if call.function else call %}
{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
"""

STOCK: dict[str, Stock] = {
    "llama-2": Stock(
        """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- for m in (messages[1:] if system is not none else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('turns!') }}{%- endif %}
{%- if m.role == 'user' %}
{{- bos_token + '[INST] ' }}
{%- if loop.first and system is not none %}
{{- '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}
{%- endif %}
{{- m.content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}""",
        ("<s>", "</s>", "<unk>"), "<s>", "</s>", "</s>", is_sentencepiece=True,
    ),
    "llama-3": Stock(
        """\
{%- for m in messages %}
{%- set turn = '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim
    + '<|eot_id|>' %}
{%- if loop.first %}{%- set turn = bos_token + turn %}{%- endif %}
{{- turn }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>"),
        "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>",
    ),
    "llama-3.2": Stock(
        """\
{%- set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + day + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content | trim }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", ' }}
{{- '"parameters": ' }}{{- f.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim }}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>"),
        "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", has_tools=True,
    ),
    "mistral-v0.1": Stock(
        "{{- bos_token }}" + ALTERNATE + """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- m.content + eos_token + ' ' }}{%- endif %}
{%- endfor %}""",
        ("<s>", "</s>", "<unk>"), "<s>", "</s>", "</s>", has_system=False, is_sentencepiece=True,
    ),
    "mistral-v0.3": Stock(
        """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- else %}{{- raise_exception('only these roles') }}{%- endif %}
{%- endfor %}""",
        ("<s>", "</s>", "<unk>", "[INST]", "[/INST]"), "<s>", "</s>", "</s>",
        has_system=False, is_sentencepiece=True,
    ),
    "zephyr": Stock(
        """\
{% for m in messages %}
{% if m['role'] == 'user' %}
{{ '<|user|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'system' %}
{{ '<|system|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
        ("<s>", "</s>", "<unk>"), "<s>", "</s>", "</s>", is_sentencepiece=True,
    ),
    "chatml": Stock(CHATML, (*IM, "<|endoftext|>"), None, "<|im_end|>", "<|im_end|>"),
    "qwen2.5": Stock(
        QWEN_TOOLS + """\
{%- if not tools and messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are of use.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif not (loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role }}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
""" + QWEN_CALLS + """\
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
        (*IM, "<|endoftext|>"), None, "<|im_end|>", "<|im_end|>", has_tools=True,
        plain=("<tool_call>", "</tool_call>"),
    ),
    "qwen3": Stock(
        QWEN_TOOLS + """\
{%- set at = namespace(last_question=messages | length - 1, is_open=true) %}
{%- for m in messages[::-1] %}
{%- if at.is_open and m.role == 'user' %}
{%- set at.is_open = false %}
{%- set at.last_question = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set said = m.content or '' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > at.last_question and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said.lstrip('\\n') }}
""" + QWEN_CALLS + """\
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}""",
        (*IM, "<|endoftext|>"), None, "<|im_end|>", "<|im_end|>", has_tools=True,
        plain=("<tool_call>", "</tool_call>", "<think>", "</think>"), is_turn_by_turn=True,
        lead="<think>\n\n</think>\n\n",
    ),
    "gemma-2": Stock(
        """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('no role of system') }}{%- endif %}
""" + ALTERNATE + """\
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", "<end_of_turn>",
        has_system=False, plain=("\n",), is_sentencepiece=True,
    ),
    "phi-3": Stock(
        """\
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}""",
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<unk>"),
        "<s>", "<|endoftext|>", "<|end|>", is_sentencepiece=True,
    ),
    "phi-4": Stock(
        """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}""",
        (*IM, "<|im_sep|>", "<|endoftext|>"), "<|endoftext|>", "<|im_end|>", "<|im_end|>",
    ),
    "deepseek-v2": Stock(
        """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- 'User: ' + m.content + '\\n\\n' }}
{%- elif m.role == 'assistant' %}{{- 'Assistant: ' + m.content + eos_token }}
{%- else %}{{- m.content + '\\n\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}""",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    ),
    "vicuna": Stock(
        """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content + ' ' }}
{%- elif m.role == 'user' %}{{- 'USER: ' + m.content + ' ' }}
{%- else %}{{- 'ASSISTANT: ' + m.content + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}""",
        ("<s>", "</s>", "<unk>"), "<s>", "</s>", "</s>", is_sentencepiece=True,
    ),
    "alpaca": Stock(
        """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content + '\\n\\n' }}
{%- elif m.role == 'user' %}{{- '### Instruction:\\n' + m.content + '\\n\\n' }}
{%- else %}{{- '### Response:\\n' + m.content + '\\n\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}""",
        ("<s>", "</s>", "<unk>"), "<s>", "</s>", "", is_turn_by_turn=True, is_sentencepiece=True,
    ),
    "openchat": Stock(
        """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content + '<|end_of_turn|>' }}
{%- else %}{{- 'GPT4 Correct ' + m.role.title() + ': ' + m.content + '<|end_of_turn|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'GPT4 Correct Assistant:' }}{%- endif %}""",
        ("<s>", "</s>", "<unk>", "<|end_of_turn|>"), "<s>", "<|end_of_turn|>", "<|end_of_turn|>",
        is_sentencepiece=True,
    ),
    "starling": Stock(
        """\
{{- bos_token }}
{%- for m in messages %}
{%- set who = 'Code User' if m.role == 'user' else 'Code Assistant' %}
{%- if m.role == 'system' %}{{- raise_exception('no role of system') }}{%- endif %}
{{- who + ': ' + m.content + '<|end_of_turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Code Assistant:' }}{%- endif %}""",
        ("<s>", "</s>", "<unk>", "<|end_of_turn|>"), "<s>", "<|end_of_turn|>", "<|end_of_turn|>",
        has_system=False, is_sentencepiece=True,
    ),
    "falcon": Stock(
        """\
{%- for m in messages %}
{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{%- if m.role == 'system' %}{{- m.content.strip() }}
{%- elif m.role == 'user' %}{{- 'User: ' + m.content.strip().replace('\\n\\n', '\\n') }}
{%- else %}{{- 'Falcon: ' + m.content.strip() }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\\nFalcon:' }}{%- endif %}""",
        ("<|endoftext|>",), None, "<|endoftext|>", "", is_turn_by_turn=True,
    ),
    "command-r": Stock(
        """\
{{- bos_token }}
{%- for m in messages %}
{%- set who = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] %}
{{- '<|START_OF_TURN_TOKEN|><|' + who + '_TOKEN|>' + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- endif %}""",
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
         "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
    ),
    "granite-3": Stock(
        """\
{%- for m in messages %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}""",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>",
    ),
    "smollm": Stock(
        """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\\nYou are small and of use.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
        (*IM, "<|endoftext|>"), "<|im_start|>", "<|im_end|>", "<|im_end|>",
    ),
    "tulu": Stock(
        """\
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{- '<|' + m.role + '|>\\n' + m.content + '\\n' }}
{%- elif not loop.last %}{{- '<|assistant|>\\n'  + m.content + eos_token + '\\n' }}
{%- else %}{{- '<|assistant|>\\n'  + m.content + eos_token }}{%- endif %}
{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
{%- endfor %}""",
        ("<|begin_of_text|>", "<|end_of_text|>"), "<|begin_of_text|>", "<|end_of_text|>",
        "<|end_of_text|>",
    ),
    "olmo": Stock(
        """\
{{- eos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content + '\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>\\n' + m.content + eos_token }}
{%- if not loop.last %}{{- '\\n' }}{%- endif %}
{%- else %}{{- '<|system|>\\n' + m.content + '\\n' }}{%- endif %}
{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
{%- endfor %}""",
        ("<|endoftext|>",), None, "<|endoftext|>", "<|endoftext|>", plain=("  ", "    "),
    ),
    "yi": Stock(
        """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- endif %}
{%- if system is defined %}{{- system }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n<|im_start|>assistant\\n' }}
{%- elif m.role == 'assistant' %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}""",
        ("<|startoftext|>", "<|endoftext|>", *IM), "<|startoftext|>", "<|im_end|>", "<|im_end|>",
        is_sentencepiece=True,
    ),
    "solar": Stock(
        """\
{%- for m in messages %}
{{- '### ' + m.role.title() + ':\\n' + m.content }}
{%- if not loop.last or m.role != 'assistant' %}{{- '\\n\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Assistant:\\n' }}{%- endif %}""",
        ("<s>", "</s>", "<unk>"), "<s>", "</s>", "", is_turn_by_turn=True, is_sentencepiece=True,
    ),
    "neural-chat": Stock(
        """\
{%- for m in messages %}
{{- '### ' + m.role.title() + ':\\n' + m.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Assistant:\\n' }}{%- endif %}""",
        ("<s>", "</s>", "<unk>"), "<s>", "</s>", "", is_turn_by_turn=True, is_sentencepiece=True,
    ),
    "without-a-generation-prompt": Stock(
        CHATML.partition("{%- if add")[0], (*IM, "<|endoftext|>"), None, "<|im_end|>", "<|im_end|>",
    ),
}  # fmt: skip

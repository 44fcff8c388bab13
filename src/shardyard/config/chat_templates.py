"""Chat templates that ``data.chat_template`` knows by name, for models that come without one.

Written by us to the published forms; the model's own, where it has one, is the better choice.
"""

CHAT_TEMPLATES: dict[str, str] = {
    # The markers become tokens where the tokenizer has them, else they are words that are learnt.
    "chatml": """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}""",
    # Touvron et al. 2023, arXiv:2307.09288, and the reference code's [INST] and <<SYS>>.
    "llama-2": """\
{% set said = namespace(system='') %}
{% for message in messages %}
{% if message['role'] == 'system' and loop.first %}
{% set said.system = '<<SYS>>\n' + message['content'].strip() + '\n<</SYS>>\n\n' %}
{% elif message['role'] == 'user' %}
{{ bos_token + '[INST] ' + said.system + message['content'].strip() + ' [/INST]' }}
{%- set said.system = '' %}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'].strip() + ' ' + eos_token }}
{%- else %}
{{ raise_exception('it knows a first message of system, and user and assistant alone') }}
{%- endif %}
{% endfor %}""",
    # Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca
    "alpaca": """\
{% for message in messages %}
{% if message['role'] == 'system' %}
{{ message['content'] + '\n\n' }}
{%- elif message['role'] == 'user' %}
{{ '### Instruction:\n' + message['content'] + '\n\n' }}
{%- elif message['role'] == 'assistant' %}
{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}
{%- else %}
{{ raise_exception('it knows messages of system, user and assistant alone') }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '### Response:\n' }}
{%- endif %}""",
}
"""Name -> template, as transformers takes it."""

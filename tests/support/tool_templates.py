"""Chat templates that take calls of tools in different ways, each after those of a family of models."""

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN25 = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}{{ '\\n<tool_response>\\n' }}{{ message.content }}{{ '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}"""

QWEN3_CODER = """{% for message in messages %}{{ message.role }}:
{%- if message.content is string %}{{ message.content | trim }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}{{ '<function=' + tool_call.function.name + '>' }}
    {%- for name, value in tool_call.function.arguments | items %}
        {{- '<parameter=' + name + '>' }}{{ value if value is string else value | tojson }}</parameter>
    {%- endfor %}
{%- endfor %}
{%- endfor %}"""

DEEPSEEK_V3 = """{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '<User>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
    {%- for tool in message['tool_calls'] %}
        {{- '<call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\\n```json\\n' }}
        {{- tool['function']['arguments'] + '\\n```' }}
    {%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
    {%- if '</think>' in message['content'] %}{{ message['content'].split('</think>')[-1] }}
    {%- else %}{{ '<Assistant>' + message['content'] }}{% endif %}
{%- endif %}
{%- if message['role'] == 'tool' %}{{ '<output>' + message['content'] }}{% endif %}
{%- endfor %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- '[TOOL_CALLS] [' }}
    {%- for tool_call in message.tool_calls %}
        {%- set out = tool_call.function | tojson %}{{ out[:-1] }}
        {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}{{ ', "id": "' + tool_call.id + '"}' }}
    {%- endfor %}{{ ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}
{%- elif message['role'] == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}{{ raise_exception('no such role') }}{% endif %}
{%- endfor %}"""

GETS = """{% for message in messages %}{{ message.get('role') ~ ': ' ~ message.get('content', '') }}
{%- for call in message.get('tool_calls') or [] %}
    {%- set function = call.get('function', {}) %}
    {{- function.get('name') + ' with ' }}
    {%- for name in function.get('arguments', {}).keys() %}{{ name }}={{ function.arguments.get(name) | tojson }}
    {%- endfor %}
{%- endfor %}
{%- endfor %}"""

STRICT = """{% for message in messages %}
{%- if message.content is not string %}{{ raise_exception('content has to be a string') }}{% endif %}
{{- message.role + ': ' + message.content }}
{%- if message.role == 'tool' %}{{ ' from ' + message.name }}{% endif %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
    {%- if call.function.arguments is not mapping %}{{ raise_exception('arguments have to be an object') }}{% endif %}
    {{- call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}{% endif %}
{%- endfor %}"""

TEXTS = """{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}
{%- for call in message['tool_calls'] if 'tool_calls' in message %}
    {%- if call['function']['arguments'] is not string %}{{ raise_exception('arguments have to be text') }}{% endif %}
    {{- call['function']['name'] + '(' + call['function']['arguments'] + ')' }}
{%- endfor %}
{%- endfor %}"""

ABSENT = """{% for message in messages %}{{ message.role }}
{%- if 'content' in message %}{{ message.content + ';' }}{% else %}
    {%- for call in message.tool_calls %}{{ call.function.name ~ '(' ~ call.function.arguments ~ ')' }}{% endfor %}
{%- endif %}
{%- endfor %}"""

SHOWING = {  # calls
    "qwen2.5": QWEN25, "qwen3 coder": QWEN3_CODER, "deepseek v3": DEEPSEEK_V3, "mistral": MISTRAL, "gets": GETS,
    "strict": STRICT, "texts": TEXTS, "absent": ABSENT,
}  # fmt: skip
ALL = {"smollm2": SMOLLM2, **SHOWING}

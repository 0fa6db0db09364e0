"""Chat templates: the shapes that models come with, and what a sandbox is for."""

from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from pdserve.base.errors import ConfigError
from pdserve.protocol.refusal import RefusedError, Status
from pdserve.text import chat
from pdserve.text.chat import ChatMessage, ChatOptions, ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    ChatMessage("system", "Be brief.\n"),
    ChatMessage("user", " What is 1 < 2 & “why”? {{ 7 * 7 }} "),
    ChatMessage("assistant", "It is.\n\n"),
    ChatMessage("user", "日本語 😀"),
]
SHAPES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "headers": """{{ bos_token }}
{%- set loop_messages = messages %}
{% for message in loop_messages %}
    {% set content = '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' ~ message['content'] | trim %}
    {% if loop.last %}{{ content }}{% else %}{{ content ~ '<|eot_id|>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{% endif %}
{% if tools is not none %}no tools here{% endif %}
""",
    "instructions": """{{ bos_token }}{% set ns = namespace(system='') %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% set ns.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'user' %}{{ '[INST] ' + ns.system + message.content.strip() + ' [/INST]' }}
        {%- set ns.system = '' %}
    {% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
    {% else %}{{ raise_exception('only user, system and assistant') }}{% endif %}
{% endfor %}""",
    "macro and json": """
{%- macro turn(role, content) -%}<|{{ role }}|>{{ content }}<|end|>{%- endmacro -%}
{{- {'system': messages[0].content, 'n': messages | length} | tojson }}
{% for message in messages[1:] if message.content is defined -%}
{{ turn(message.role, message.content | replace('\\n', ' ')) }}
{% generation %}
{{ loop.index0 }}
{% endgeneration %}
{% if loop.index0 > 1 %}{% break %}{% endif %}
{%- endfor %}
{{- unknown_variable }}{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}
""",
}
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ (''|attr('__class__'))() | attr('__mro__') }}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ raise_exception.__globals__['jinja2'].__version__ }}",
    "{% include '/etc/passwd' %}",
    "{{ range(10**9) | list | length }}",
]


EVERYTHING = """{{ bos_token }}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for document in documents or [] %}[{{ document.title }}: {{ document['text'] | upper }}]{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}
{%- for message in messages %}
{{ message.role }}{% if message.name %}({{ message.name }}){% endif %}: {% if message.reasoning_content %}<think>
{{- message.thinking }}</think>{% endif %}
{%- for call in message.tool_calls or [] %}
<call {{ call.id }}>{{ call.function.name }} {{ call.function.arguments.items() | list | tojson }}
{%- endfor %}
{%- if message.content is defined %}{{ message.content if keep else message.content.strip() }}{% endif %}
{%- if message.tool_call_id %} <- {{ message['tool_call_id'] }}{% endif %};
{%- endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}},
}
WITH_TOOLS = [
    ChatMessage("user", "How is it?", name="Ann"),
    ChatMessage("assistant", None, tool_calls=[CALL], reasoning_content="look it up"),
    ChatMessage("tool", '{"c": 3}', tool_call_id="c1"),
    ChatMessage("assistant", " It is cold and "),
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def plain(messages: list[ChatMessage]) -> list[dict[str, object]]:
    return [message.plain() for message in messages]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("continued", [True, False])
def test_tools_documents_and_arguments_render_as_in_transformers(
    byte_level_backend: tokenizers.Tokenizer, *, keep: bool, continued: bool
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend, **SPECIAL)
    documents = [{"title": "A", "text": "body"}]
    options = ChatOptions(TOOLS, documents, {"enable_thinking": False, "keep": keep}, not continued, continued)
    rendered = ChatTemplate(EVERYTHING, SPECIAL).render(WITH_TOOLS, options)
    assert rendered == reference.apply_chat_template(
        plain(WITH_TOOLS),
        tools=TOOLS,
        documents=documents,
        chat_template=EVERYTHING,
        tokenize=False,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        enable_thinking=False,
        keep=keep,
    )
    assert rendered.endswith(("cold and ", "cold and") if continued else "assistant:")
    assert "Zürich" in rendered


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs: messages is a field of its own"),
        ({"continue_final_message": True}, "continue_final_message: goes with add_generation_prompt false alone"),
    ],
)
def test_options_that_go_against_each_other_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint):
        ChatOptions(**options)


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RefusedError, match="continue_final_message: the model's template does not show"):
        ChatTemplate("{{ messages[0].content }}", SPECIAL).render(TALK, options)
    with pytest.raises(RefusedError, match="continue_final_message: the last message has no text"):
        ChatTemplate(EVERYTHING, SPECIAL).render([ChatMessage("user", "")], options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_famous_shapes_render_as_in_transformers(
    byte_level_backend: tokenizers.Tokenizer, shape: str, add_generation_prompt: bool
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend, **SPECIAL)
    for messages in (TALK, TALK[:2]):
        options = ChatOptions(add_generation_prompt=add_generation_prompt)
        rendered = ChatTemplate(SHAPES[shape], SPECIAL).render(messages, options)
        assert rendered == reference.apply_chat_template(
            plain(messages),
            chat_template=SHAPES[shape],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        assert (messages[1].content or "").strip() in rendered.replace("\\n", "\n")


@pytest.mark.parametrize("source", ESCAPES)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RefusedError, match=r"chat: the model's template refuses the messages"):
        ChatTemplate(source, SPECIAL).render(TALK)


def test_what_the_template_says_against_the_messages_reaches_the_client() -> None:
    template = ChatTemplate(SHAPES["instructions"], SPECIAL)
    with pytest.raises(RefusedError) as refused:
        template.render([ChatMessage("tool", "x")])
    assert refused.value.refused.status is Status.INVALID_ARGUMENT
    assert "only user, system and assistant" in refused.value.refused.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages['x'].y }}",
        "{{ messages[0].content + 1 }}",
        "{{ ['a'] | join(1)(2) }}",
        "{{ none.x.y }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | tojson(indent='x') + 1 }}",
    ],
)
def test_whatever_a_template_stumbles_over_is_one_requests_error(source: str) -> None:
    with pytest.raises(RefusedError, match=r"^chat: "):
        ChatTemplate(source, SPECIAL).render(TALK)


def test_a_template_that_is_none_is_refused_when_the_model_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"chat_template: line 2: "):
        ChatTemplate("ok\n{% if %}", SPECIAL)


def test_output_without_end_is_cut_off_by_its_length() -> None:
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}"
    with pytest.raises(RefusedError, match=f"over the limit of {chat.MAX_OUTPUT_CHARS} characters"):
        ChatTemplate(endless, SPECIAL).render(TALK)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], r"chat: 0 messages are outside \[1, 4096\]"),
        ([ChatMessage("user", "")] * 4097, r"chat: 4097 messages are outside \[1, 4096\]"),
        ([ChatMessage("user", "x" * (chat.MAX_INPUT_CHARS - 3))], r"chat: 4194305 characters are over"),
    ],
)
def test_messages_over_a_limit_are_refused_before_rendering(messages: list[ChatMessage], complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint):
        ChatTemplate("{{ 1 / 0 }}", SPECIAL).render(messages)


def test_a_template_may_show_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: f"<{form}>")
    assert ChatTemplate("{{ strftime_now('%d %b') }}", SPECIAL).render(TALK) == "<%d %b>"


FIRST_ALONE = """{% for message in messages %}
{% if message.role == 'system' and not loop.first %}{{ raise_exception('a system message comes first') }}{% endif %}
{% if loop.first and message.role != 'system' %}[system: the default]{% endif %}
[{{ message.role }}: {{ message.content }}]{% endfor %}"""
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}",
    "{% for m in messages %}{% if m.role in ['system', 'developer'] %}D{% endif %}{{ m.role }};{% endfor %}",
    "{% set names = {'developer': 'D'} %}{% for m in messages %}{{ names.get(m.role, '') }}{{ m.role }};{% endfor %}",
)


@pytest.mark.parametrize(
    ("roles", "rendered"),
    [
        ("D", "[system: 0][user: x]"),
        ("SD", "[system: 0\n\n1][user: x]"),
        ("DD", "[system: 0\n\n1][user: x]"),
        ("DS", "[system: 0\n\n1][user: x]"),
        ("SDD", "[system: 0\n\n1\n\n2][user: x]"),
        ("S", "[system: 0][user: x]"),
        ("", "[system: the default][user: x]"),
    ],
)
def test_what_a_developer_writes_is_a_system_message_of_a_template_that_does_not_name_the_role(
    roles: str, rendered: str
) -> None:
    names = {"D": "developer", "S": "system"}
    first = [ChatMessage(names[role], str(place)) for place, role in enumerate(roles)]
    text = ChatTemplate(FIRST_ALONE, SPECIAL).render([*first, ChatMessage("user", "x")])
    assert text.replace("\n[", "[") == rendered


def test_system_messages_without_a_developers_beside_them_reach_the_template_as_they_are() -> None:
    template = ChatTemplate(FIRST_ALONE, SPECIAL)
    system, developer, user = ChatMessage("system", "a"), ChatMessage("developer", "b"), ChatMessage("user", "x")
    for messages in ([system, system, user], [system, user, developer]):
        with pytest.raises(RefusedError, match="a system message comes first"):
            template.render(messages)


@pytest.mark.parametrize("source", KNOWN_ROLES)
def test_a_template_that_names_the_developer_gets_the_role(source: str) -> None:
    template = ChatTemplate(source, SPECIAL)
    assert template.render([ChatMessage("developer", "x")]).startswith("Ddeveloper")


def test_a_template_that_only_talks_of_developers_does_not_know_the_role() -> None:
    source = "{# no developer #}developer{{ 'You help a developer.' }}{% for m in messages %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(source, SPECIAL).render([ChatMessage("developer", "x")]).endswith("system")

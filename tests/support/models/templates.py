"""Chat templates: in the manner of public families of models, and hostile ones, which never end or
do more than templates may."""

from __future__ import annotations

NEST = "{% for a in range(90000) %}" * 3
ENDLESS = {
    "loops": NEST + "{% set x = a %}" + "{% endfor %}" * 3,
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}"
    "{% endfor %}",
}
REFUSED = {
    "much": (
        "{% for a in range(90000) %}{{ messages[0].content * 100 }}{% endfor %}",
        "characters",
    ),
    "repeated": ("{{ 'x' * 999999999999 }}", "more than"),
    "repeated list": ("{{ 99999999 * [1] }}", "more than"),
    "power": ("{{ 9 ** 999999999 }}", "more than 64"),
    "range": ("{% for a in range(999999999) %}{% endfor %}", "Range too big"),
    "class": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__['os'].system('true') }}", "unsafe"),
    "namespace": ("{% set ns = namespace(__class__=1) %}", "__class__"),
    "namespace later": ("{% set ns = namespace() %}{% set ns._a = 1 %}", "_a"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "change": ("{{ messages.append(1) }}", "not callable|unsafe"),
}

_ALTERNATION = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
)
_FIRST_IS_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}"
)
_PROMPT = "{% if add_generation_prompt %}"
_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_CHATML_PROMPT = _PROMPT + "{{ '<|im_start|>assistant\n' }}{% endif %}"
FAMILIES = {
    # Any role, as it comes: Qwen 2, Yi, SmolLM2.
    "chatml": "{% for m in messages %}" + _CHATML + "{% endfor %}" + _CHATML_PROMPT,
    # Thoughts of earlier answers are left out: Qwen 3.
    "thinking": "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}"
    "{% elif m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ '<|im_start|>assistant\n' + m.content.split('</think>')[-1].lstrip() + '<|im_end|>\n' }}"
    "{% else %}" + _CHATML + "{% endif %}{% endfor %}" + _CHATML_PROMPT,
    # A flag in the system message, which is not part of the prompt: SmolLM3.
    "flags": _FIRST_IS_SYSTEM
    + "{% set mode = '/no_think' if '/no_think' in system else '/think' %}"
    "<|im_start|>system\n{{ mode }}: {{ system.replace('/no_think', '').rstrip() }}<|im_end|>\n"
    "{% for m in rest %}" + _CHATML + "{% endfor %}" + _CHATML_PROMPT,
    # Trimmed: Llama 3.
    "llama3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    + _PROMPT
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    # The system message in the first turn: Llama 2, Mistral.
    "llama2": _FIRST_IS_SYSTEM + _ALTERNATION + "{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content | trim + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content | trim + eos_token }}{% endif %}"
    "{% endfor %}",
    # The system message in the last turn: Mistral 7B v0.3.
    "mistral3": _FIRST_IS_SYSTEM + _ALTERNATION + "{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    # No system message: Gemma 2.
    "gemma2": "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% set rest = messages %}"
    + _ALTERNATION
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    + _PROMPT
    + "{{ '<start_of_turn>model\n' }}{% endif %}",
    # Before the first turn: Gemma 3.
    "gemma3": _FIRST_IS_SYSTEM
    + _ALTERNATION
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    + _PROMPT
    + "{{ '<start_of_turn>model\n' }}{% endif %}",
    # A branch for each role, and none for others: Phi 3.
    "phi3": "{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>' + m.content }}"
    "{% elif m.role == 'user' %}{{ '<|user|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content }}{% endif %}{% endfor %}"
    + _PROMPT
    + "{{ '<|assistant|>' }}{% endif %}",
    # Only users and assistants, silently: many fine-tuned ones.
    "turns": "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ ' ASSISTANT: ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}" + _PROMPT + "{{ ' ASSISTANT:' }}{% endif %}",
    # Of system messages the last one only: DeepSeek V2.5's predecessors.
    "last system": "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}"
    "{{ bos_token + ns.system }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|User|>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}{% endfor %}"
    + _PROMPT
    + "{{ '<|Assistant|>' }}{% endif %}",
    # A developer's message only with tools: DeepSeek V3.2.
    "tools' developer": "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ '<|System|>' + m.content }}{% elif m.role == 'developer' and tools %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}{% endfor %}"
    + _PROMPT
    + "{{ '<|Assistant|>' }}{% endif %}",
    # It names the developer: gpt-oss.
    "developer": "{% if messages[0].role in ['developer', 'system'] %}"
    "{{ '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '<|end|>' }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}" + _PROMPT + "{{ '<|start|>assistant' }}{% endif %}",
}

_CALLS = (
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + '
    '\'", "arguments": \' + (c.function.arguments if c.function.arguments is string '
    "else c.function.arguments | tojson) + '}\n</tool_call>\n' }}{% endfor %}"
)
TOOLED = {
    # Thoughts of a field of their own, and calls in tags: Qwen 3.
    "qwen3": "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for t in tools %}"
    "{{ '\n' + t | tojson }}{% endfor %}{{ '\n</tools> in <tool_call></tool_call>, with the keys "
    '"arguments" and "name"<|im_end|>\n\' }}{% endif %}'
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ m.content }}{% endif %}"
    + _CALLS
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    + _CHATML_PROMPT
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
    # Ids of nine letters, and one result a message: Mistral.
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}"
    "{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls is defined and m.tool_calls %}{{ '[TOOL_CALLS] [' }}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + "
    "', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    # One call in a message: Llama 3.
    "llama3.1": "{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    '{{ tools | tojson + \'{"name": function name, "parameters": dictionary of argument name}\' }}'
    "{{ '<|eot_id|>' }}{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + '
    "'\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}"
    "{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}",
    # Thoughts in a channel, and never next to a text with a call: gpt-oss.
    "harmony": "{{ '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') "
    "+ '<|end|>' }}{% if tools %}{{ '<|start|>developer<|message|># Tools' }}{% for t in tools %}"
    "{{ '\ntype ' + t.function.name + ' = ' + t.function.parameters | tojson }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking "
    "in an assistant message with tool calls!') }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) "
    "+ '<|end|>' }}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' "
    "+ call.arguments | tojson + '<|call|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' "
    "+ m.content + '<|end|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}" + _PROMPT + "{{ '<|start|>assistant' }}{% endif %}",
}
"""Families that know tools."""

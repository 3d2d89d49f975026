"""Chat templates that never end, or do more than templates may."""

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

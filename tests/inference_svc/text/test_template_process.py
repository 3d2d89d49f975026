"""Hostile chat templates of adapters end in bounded time and memory, and harm no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from inference_svc.errors import AdapterUnusable, TemplateTimeout
from inference_svc.text.chat import Chat, ChatMessage, MessageImage
from inference_svc.text.template_process import NUM_CHILDREN, TemplateProcesses
from inference_svc.text.template_process.task import MAX_TEMPLATES, Templates
from servicekit.errors import InvalidArgument, ServiceError
from tests.support.models.templates import ENDLESS, REFUSED
from tests.support.models.tokenizers import CHAT_TEMPLATE
from tests.support.pairs import long_but

pytestmark = pytest.mark.processes

CHAT = Chat((ChatMessage("user", "hi"),))
SECONDS = 0.3
DOUBLED = "{% set ns = namespace(x='x' * 1000) %}{% for i in range(60) %}"

TOO_MUCH = {
    "doubling with ~": DOUBLED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling with +": DOUBLED + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by join": DOUBLED + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubling by replace": "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
    "doubling by format": DOUBLED + "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}{% endfor %}",
    "doubling a list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "width of %": "{{ '%9999999999d' % 1 }}",
    "width of format": "{{ '{:>9999999999}'.format(1) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "indent": "{{ ('x\n' * 100000) | indent(100000) }}",
    "tojson": "{{ {'a': [1]} | tojson(indent=9999999999) }}",
    "batch": "{{ [1] | batch(9999999999, 0) | list }}",
    "wordwrap": "{{ ('x ' * 500000) | wordwrap(1) | wordwrap(2) | wordwrap(1) }}" * 20,
    "sort": "{% set x = range(99999) | list %}"
    + "{{ x | sort(reverse=true) | unique | list }}" * 99,
    "products": "{{ " + " * ".join(["(9 ** 64)"] * 9000) + " }}",
    "constants": "{{ " + " ~ ".join(["'x' * 1000000"] * 3000) + " }}",
    "nested parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "nested blocks": "{% if true %}" * 20_000 + "{% endif %}" * 20_000,
    "long chain": "{{ 1" + " + 1" * 200_000 + " }}",
    "many loops": "{% for a in range(99999) %}" * 15 + "{% endfor %}" * 15,
    "filters": "{{ 'x'" + " | upper" * 100_000 + " }}",
    "decimal": "{{ (10 ** 64) ** 64 ** 64 | string }}",
    "digits": "{% set ns = namespace(x=9) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}{{ ns.x | string }}",
    "urlize": "{{ ('www.' * 200000) | urlize }}",
    "striptags": "{{ ('<' * 500000) | striptags }}",
}
LONG = {
    *("doubling with +", "doubling by join", "doubling by format", "center", "ljust", "indent"),
    *("wordwrap", "filters", "digits", "recursive loop", "width of %"),
}
"""These end by the same limit as a neighbour: `make test-long` renders them, too."""
QUICK = [name for name in (*TOO_MUCH, *ENDLESS) if name not in LONG]


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses()
    yield made
    made.close()


def children_of(processes: TemplateProcesses) -> list[psutil.Process]:
    """Returns those that are idle. This process has others' children, too, which are to live."""
    return [psutil.Process(child.pid) for child in processes.pool.idle]


def render(processes: TemplateProcesses, source: str, seconds: float = SECONDS) -> str:
    return processes.render(source, {"eos_token": "</s>"}, CHAT, 10_000, seconds)


def check_works(processes: TemplateProcesses) -> None:
    assert render(processes, CHAT_TEMPLATE) == "<s>user: hi</s><s>assistant:"


@pytest.mark.parametrize("name", long_but(QUICK, (*TOO_MUCH, *ENDLESS)))
def test_what_takes_too_much_ends_and_others_go_on(processes: TemplateProcesses, name: str) -> None:
    before = psutil.Process().memory_info().rss
    start_s = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        render(processes, (TOO_MUCH | ENDLESS)[name])
    assert isinstance(caught.value, (TemplateTimeout, InvalidArgument, AdapterUnusable))
    assert time.monotonic() - start_s < 10
    for child in children_of(processes):
        assert child.memory_info().rss < 400 << 20
    assert psutil.Process().memory_info().rss - before < 64 << 20
    check_works(processes)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_sandbox_refuses(processes: TemplateProcesses, name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(InvalidArgument, match=message) as caught:
        render(processes, source, 10.0)
    assert caught.value.subject == "chat"
    check_works(processes)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x", "{% nothing %}", "{{ a | nofilter }}"])
def test_what_is_no_template_is_the_adapters_fault(
    processes: TemplateProcesses, source: str
) -> None:
    with pytest.raises(AdapterUnusable, match="cannot be used") as caught:
        render(processes, source)
    assert (caught.value.subject, caught.value.reason) == ("chat_template", "CHAT_TEMPLATE_INVALID")


def test_images_that_a_template_does_not_show_are_named(processes: TemplateProcesses) -> None:
    where = "messages[0].content[1].image_url"
    chat = Chat((ChatMessage("user", "hi", images=(MessageImage(0, b"", where),)),))
    with pytest.raises(InvalidArgument, match="shows no images") as refused:
        processes.render(CHAT_TEMPLATE, {"eos_token": "</s>"}, chat, 10_000, 5.0)
    assert refused.value.subject == where
    assert refused.value.message.startswith(f"{where}: ")


def test_a_template_sees_no_environment_and_writes_no_file(processes: TemplateProcesses) -> None:
    check_works(processes)
    for child in children_of(processes):
        assert set(child.environ()) <= {"PATH", "LC_ALL", "LC_CTYPE", "OMP_NUM_THREADS"}


def test_a_child_that_was_ended_is_replaced(processes: TemplateProcesses) -> None:
    check_works(processes)
    ended = children_of(processes)
    assert ended
    for child in ended:
        child.kill()
        child.wait()
    check_works(processes)
    assert not {child.pid for child in ended} & {child.pid for child in children_of(processes)}


def test_many_conversations_at_once_get_their_own_answers() -> None:
    processes = TemplateProcesses()
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        message = ChatMessage("user", f"{number}" * 1000)
        found[number] = processes.render(
            "{{ messages[0].content }}", {}, Chat((message,)), 10_000, 5.0
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number}" * 1000 for number in range(20)}
    children = children_of(processes)
    assert 0 < len(children) <= NUM_CHILDREN
    processes.close()
    assert not any(child.is_running() for child in children)


def test_compiled_templates_are_bounded_by_number_and_by_size() -> None:
    templates = Templates()
    first = templates.get("{{ 0 }}", {})
    for number in range(1, MAX_TEMPLATES):
        templates.get(f"{{{{ {number} }}}}", {})
    assert templates.get("{{ 0 }}", {}) is first
    templates.get("one more", {})
    assert templates.get("{{ 0 }}", {}) is first, "used after the others"
    large = templates.get("x" * 600_000, {})
    assert templates.get("x" * 600_000, {}) is large
    templates.get("y" * 600_000, {})
    assert templates.get("x" * 600_000, {}) is not large

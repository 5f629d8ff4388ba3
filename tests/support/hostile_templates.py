"""Chat templates that take much time or memory, by what they do."""

from __future__ import annotations

_SHARED = "{% set a = ['x'] %}{% set b = ['x'] %}" + "{% set a = [a, a] %}{% set b = [b, b] %}" * 40
"""Two equal lists whose texts have 2**40 elements."""
_TUPLES = "{% set t = ('x',) %}" + "{% set t = (t, t) %}" * 40
_FOREVER = "{% for i in range(99999) %}BODY{% endfor %}"


def _forever(body: str) -> str:
    return _FOREVER.replace("BODY", body)


HOSTILE: dict[str, str] = {
    # one operation on numbers or texts
    "power": "{{ ((((2**1024)**1024)**1024)**2) % 7 }}",
    "products": "{% set ns = namespace(x=2**1000) %}" + _forever("{% set ns.x = ns.x * ns.x %}"),
    "repeated text": "{{ 'x' * 3000000000 }}",
    "repeated list": "{{ ([1] * 3000000000) | length }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format with a width": "{{ '{:1000000000}'.format(1) }}",
    "center": "{{ ''.center(10**10) }}",
    "zfill": _forever("{{ 'x'.zfill(30000000) | length }}"),
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "join": "{{ (range(100000) | list | join('a' * 30000)) | length }}",
    "method join": "{{ ('a' * 30000).join(range(100000) | map('string')) | length }}",
    "replace": "{% set a = 'a' * 30000 %}" + _forever("{{ a.replace('a', a) | length }}"),
    "strip": "{% set a = 'a' * 300000 %}{{ a.strip('b' * 300000 + 'a') | length }}",
    "rfind": "{% set a = 'a' * 1000000 %}" + _forever("{{ a.rfind('b' + 'a' * 500000) }}"),
    "wordwrap": "{{ ('a ' * 16000000) | wordwrap(1) }}",
    "indentation": _forever("{{ ('\n' * 100000) | indent(1000) | length }}"),
    "title": _forever("{{ ('ab ' * 10000000) | title | length }}"),
    "method title": _forever("{{ ('ab ' * 10000000).title() | length }}"),
    "urlize": "{{ ('http://a.b ' * 1000000) | urlize }}",
    "striptags": _forever("{{ ('<a>' * 100000) | striptags | length }}"),
    "lipsum": "{{ lipsum(n=100000) }}",
    "split": _forever("{{ ('a' * 1000000).split('a') | length }}"),
    "strftime": _forever("{{ strftime_now('%Y' * 1000000) | length }}"),
    "digits": "{% set ns = namespace(x=1) %}{% for i in range(4000) %}{% set ns.x = ns.x * 10 %}{% endfor %}"
    + _forever("{{ ns.x }}"),
    "a dozen slices": "{% set a = 'x' * 8000000 %}" + _forever("{{ (a" + "[1:]" * 12 + ") | length }}"),
    # doubling
    "doubled text": "{% set a = 'x' %}" + "{% set a = a + a %}" * 60 + "{{ a | length }}",
    "doubled by ~": "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 60 + "{{ a | length }}",
    "doubled list": "{% set a = ['x'] %}" + "{% set a = a + a %}" * 60 + "{{ a | length }}",
    "doubled block": "{% set a = 'x' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60 + "{{ a | length }}",
    "doubled by replace": "{% set a = 'xx' %}" + "{% set a = a.replace('x', a) %}" * 30 + "{{ a | length }}",
    # lists that are shared by their own elements
    "shared ==": _SHARED + "{{ a == b }}",
    "shared in": _SHARED + "{{ a in [b] }}",
    "shared <": _SHARED + "{{ a < b }}",
    "shared text": _SHARED + "{{ a }}",
    "shared ~": _SHARED + "{{ a ~ 'x' }}",
    "shared JSON": _SHARED + "{{ a | tojson | length }}",
    "shared join": _SHARED + "{{ [a] | join | length }}",
    "shared string": _SHARED + "{{ a | string | length }}",
    "shared format": _SHARED + "{{ '{}'.format(a) | length }}",
    "shared sort": _SHARED + "{{ [a, b] | sort | length }}",
    "shared select": _SHARED + "{{ [a, b] | select('equalto', a) | list | length }}",
    "shared namespace": _SHARED + "{{ namespace(a=a) }}",
    "shared view": _SHARED + "{{ {'a': a}.items() }}",
    "shared view in a list": _SHARED + "{{ [{'a': a}.items()] | string | length }}",
    "shared message": _SHARED + "{{ raise_exception(a) }}",
    "shared changes": _SHARED + "{% for i in [a, b] %}{{ loop.changed(i) }}{% endfor %}",
    "shared pprint": _SHARED + "{{ a | pprint }}",
    "shared hash": _TUPLES + "{{ {}[t] }}",
    "shared get": _TUPLES + "{{ {'a': 1}.get(t) }}",
    "shared unique": _TUPLES + "{{ [t] | unique | list | length }}",
    "shared keys": _TUPLES + "{{ dict([(t, 1)]) | length }}",
    "deep JSON": "{% set ns = namespace(a=[1] * 9999) %}{% for i in range(900) %}{% set ns.a = [ns.a] %}{% endfor %}"
    + _forever("{{ ns.a | tojson(indent=16) | length }}"),
    # long lists
    "sort": _forever("{{ range(100000) | list | sort | length }}"),
    "unique": _forever("{{ range(100000) | unique | list | length }}"),
    "map": _forever("{{ range(100000) | map('string') | list | length }}"),
    "select": _forever("{{ range(100000) | select('string') | list | length }}"),
    "sum": _forever("{{ range(100000) | sum }}"),
    "sum of lists": _forever("{{ ([[1] * 1000] * 10000) | sum(start=[]) | length }}"),
    "groupby": _forever("{{ range(100000) | groupby('real') | length }}"),
    "batch": _forever("{{ range(100000) | batch(1, 'x') | list | length }}"),
    "membership": "{% set a = ['x'] * 18000 %}" + _forever("{{ 'y' in a }}"),
    "pop": "{% set a = [0] * 19000 %}" + _forever("{{ a.append(a.pop(0)) }}"),
    "long attribute": "{% set a = [{}] * 15000 %}" + _forever("{{ a | map(attribute='" + "a." * 500 + "') | list }}"),
    "memory": "{% set ns = namespace(a=[]) %}" + _forever("{% set ns.a = ns.a + [range(100000) | list] %}"),
    # many operations
    "loops": _forever(_forever("")),
    "loops with a condition": _forever("{% for i in range(99999) if i > 99999 %}{% endfor %}"),
    "length of a loop": _forever("{% for i in range(99999) %}{{ loop.length }}{% break %}{% endfor %}"),
    "long loop": _forever("{% set x = 1 %}" * 1500),
    "output": _forever("{{ 'x' * 1000000 }}"),
    "constant output": _forever(_forever("x" * 1000)),
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "recursive loop": "{% for a in [0] * 99 recursive %}{% if loop.depth < 99 %}{% set _ = loop([0] * 99) %}"
    "{% endif %}{% endfor %}",
    "long chain": "{% set a = 'x' * 300000 %}{% set b = 'x' * 300000 %}" + _forever("{{ a == b }}" * 20),
    "later": "{% if 'X' in messages[0].content %}" + _forever(_forever("")) + "{% endif %}ok",
}
LONG: dict[str, str] = {
    "macros": "".join(f"{{% macro f{i}() %}}{{% endmacro %}}" for i in range(10_000)),
    "outputs": "{{ a }}x" * 100_000,
    "sum": "{{ a" + "+a" * 400_000 + " }}",
    "parentheses": "{{ " + "(" * 400_000 + "1" + ")" * 400_000 + " }}",
    "large": "x{{ a }}" * 2_000_000,
}
"""Compiling takes long."""

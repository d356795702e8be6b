"""Templates and rendered texts: valid Python at both ends, a fixed header, a digest of the code."""

import ast
import hashlib
import re
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules

import pytest

from autoflash import families
from autoflash.families import FAMILIES, every_variant, variants
from autoflash.render import digest, render, templates_dir

TEMPLATES = sorted(templates_dir().rglob("*.jinja"))
HEADERS = sorted(path.name for path in templates_dir().glob("*.jinja"))
VARIANTS = list(every_variant().values())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.parent.name + "/" + path.name)
def test_a_template_is_valid_python_before_it_is_rendered(path):
    ast.parse(path.read_text())


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_templates_pass_ruff(arguments):
    ruff = [sys.executable, "-m", "ruff", *arguments, str(templates_dir())]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.parent.name + "/" + path.name)
def test_a_template_uses_block_lines_and_plain_expressions_only(path):
    text = path.read_text()
    tags = re.findall(r"{%|{#", text)
    assert not tags
    for line in re.findall(r"^\s*# %(.*)$", text, flags=re.MULTILINE):
        whole_lines = r" for name in variant\.\w+| endfor"  # of names that are all told alike
        assert re.match(r" (if|elif|else|endif)\b", line) or re.fullmatch(whole_lines, line), line
    for expression in re.findall(r"{{.*?}}", text):
        assert re.fullmatch(r"{{(variant\.\w+|name)}}", expression), expression


def test_every_template_is_a_part_of_a_family():
    modules = [
        import_module(f"autoflash.families.{m.name}") for m in iter_modules(families.__path__)
    ]
    used = {part for module in modules for part in getattr(module, "PARTS", ())}
    assert {str(path.relative_to(templates_dir())) for path in TEMPLATES} == used


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_has_the_same_number_of_lines_in_every_text(header):
    """Triton's cache key depends on the line that a kernel starts at."""
    text = (templates_dir() / header).read_text()
    assert "# %" not in text and "{{" not in text
    for family in FAMILIES.values():
        if family.parts[0] == header:
            rendered = [render(variant).text for variant in variants(family).values()]
            assert all(each.startswith(text) for each in rendered)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_rendered_text_is_python_with_a_plan_and_no_trace_of_its_template(variant):
    text = render(variant).text
    functions = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    assert "plan" in functions
    assert len(functions) == len(set(functions))
    assert "# %" not in text and "{{" not in text and "variant." not in text


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_part_of_a_line_is_the_template_it_was_written_in(variant):
    rendered = render(variant)
    for number, line in enumerate(rendered.text.splitlines(), 1):
        if line.startswith("def "):
            template = (templates_dir() / rendered.part_at(number)).read_text()
            assert line.split("(")[0] + "(" in template


def test_variants_that_differ_have_texts_that_differ():
    digests = [render(variant).digest for variant in VARIANTS]
    assert len(set(digests)) == len(VARIANTS)


def test_the_digest_is_of_the_code_and_not_of_comments_or_blank_lines():
    assert digest("x = 1  # one\n\n\ny = 2\n") == digest("# first\nx = 1\ny = 2\n")
    assert digest("x = 1\n") != digest("x = 2\n")
    assert digest("x = '# a'\n") != digest("x = '# b'\n")


def test_the_digest_is_the_same_in_every_version_of_python():
    code = "if x:\n    y = 1\n    z = f(x)"
    text = "if x:  # why\n    y = 1\n\n    # how\n    z = f(x)\n"
    assert digest(text) == hashlib.sha256(code.encode()).hexdigest()[:12]


def test_the_digest_notices_a_change_of_indentation():
    flat = "if x:\n    y()\nz()\n"
    assert digest(flat) != digest("if x:\n    y()\n    z()\n")

"""The wheel: built here, installed elsewhere, and it renders without the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autoflash import __version__
from autoflash.problem import Variant
from autoflash.render import render

ROOT = Path(__file__).parents[2]
NAME = f"autoflash-{__version__}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*build, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True, capture_output=True)
    return folder


def run_installed(folder: Path, script: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_it_holds_every_module_template_and_winner_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {f"autoflash/{p.relative_to(ROOT / 'autoflash')}" for p in package_files()}
    templates = {f"autoflash/_templates/{name}" for name in files_under("templates")}
    tunedb = {f"autoflash/_tunedb/{name}" for name in files_under("tunedb")}
    assert names == modules | templates | tunedb
    assert templates and tunedb


def package_files() -> list[Path]:
    return [path for end in ("py", "html") for path in (ROOT / "autoflash").rglob(f"*.{end}")]


def files_under(folder: str) -> list[str]:
    paths = (ROOT / folder).rglob("*")
    return [str(path.relative_to(ROOT / folder)) for path in paths if path.is_file()]


def test_it_carries_the_licence_and_the_command(wheel):
    archive = zipfile.ZipFile(wheel)
    licence = archive.read(f"{NAME}.dist-info/licenses/LICENSE").decode()
    assert licence == (ROOT / "LICENSE").read_text()
    commands = archive.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert "autoflash = autoflash.cli:main" in commands


def test_it_renders_the_same_text_far_from_the_checkout(installed):
    script = "from autoflash.cli import main; import sys; sys.argv[1:] = {}; main()"
    text = run_installed(installed, script.format(["render", "--variant", "decode_paged"]))
    assert text == render(Variant("decode", "decode", paged=True)).text


def test_it_finds_its_templates_and_winners_in_the_package(installed):
    script = (
        "from autoflash.render import templates_dir\n"
        "from autoflash.store import tunedb_dir\n"
        "print(templates_dir(), tunedb_dir())"
    )
    package = installed / "autoflash"
    expected = f"{package / '_templates'} {package / '_tunedb'}\n"
    assert run_installed(installed, script) == expected

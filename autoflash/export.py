"""Export: measured winners become one module that needs torch and triton only."""

import hashlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from autoflash import __version__
from autoflash.config import Config
from autoflash.errors import ExportError
from autoflash.families import FAMILIES, samples, untuned_variants, why_refused
from autoflash.gpu import Gpu
from autoflash.portfolio import Measured, Served, Unseen, choose_portfolio, reach_of, unseen
from autoflash.problem import Problem, Variant, title
from autoflash.records import ExportedProblem, Winner
from autoflash.render import render
from autoflash.runtime.device import Device
from autoflash.runtime.match import match_key, match_sizes
from autoflash.runtime.selection import SELECTION_FAMILIES
from autoflash.single_file import joined_runtime
from autoflash.whole_file import write_whole

PUBLIC = (
    "ProblemError",
    "append_kv",
    "configure",
    "coverage",
    "decode",
    "explain",
    "kv_identity",
    "merge",
    "prefill",
    "register_attention",
    "self_test",
    "use_bundle",
    "warmup",
    "write_trace",
)
APART = "\n\n\n"  # between the functions of a kernels' text
KERNELS_FOLDER = "kernels"  # of a package
Reaches = Mapping[tuple[Gpu, str], Mapping[str, float]]

MOST_CONFIGS = 8  # of one variant's portfolio, unless the user asks for another number

MADE_BY = "Made by autoflash "
DOCSTRING = '''"""Attention for the GPUs and shapes listed below: {functions}.

{made_by}{version}; not for editing. Needs torch and triton.
{provenance}
"""
'''


@dataclass(frozen=True)
class Export:
    """The module's text, its rows, and the winners left out with the reason for each.

    As a package it has `package_text` instead and a file for each of `kernels`, texts by name.
    """

    text: str
    package_text: str
    kernels: Mapping[str, str]
    rows: tuple[ExportedProblem, ...]
    left_out: tuple[tuple[Winner, str], ...]


def export(
    winners: Sequence[Winner],
    *,
    gpus: Sequence[str] = (),
    allow_predicted: bool = False,
    most_configs: int = MOST_CONFIGS,
) -> Export:
    """The module that serves these winners; the same winners give the same bytes.

    `gpus` are names or slugs to keep, all when empty. At most `most_configs` configs serve one
    variant and dtype on one GPU, chosen by measured loss. Raises ExportError when nothing is left.
    """
    kept, left_out = [], []
    for winner in winners:
        reason = _reason_to_leave_out(winner, gpus, allow_predicted)
        if reason:
            left_out.append((winner, reason))
        else:
            kept.append(winner)
    if not kept:
        reasons = sorted({reason for _, reason in left_out}) or ["no winners are stored"]
        raise ExportError(f"nothing to export: {'; '.join(reasons)}")
    rows, reaches = _portfolios(kept, most_configs)
    names = _variants(rows)
    kernels = {render(variant).name: render(variant).text for variant in names.values()}
    head, tables = _head_text(kept, rows), _tables_text(kept, rows, reaches, names)
    text = _signed(head + _texts_text(kernels) + tables)
    files = f'_TEXTS = KernelFiles(Path(__file__).parent / "{KERNELS_FOLDER}")\n'
    package = _signed(head + files + tables, "".join(kernels[name] for name in sorted(kernels)))
    return Export(text, package, kernels, tuple(rows), tuple(left_out))


def unseen_loss(rows: Sequence[ExportedProblem]) -> list[str]:
    """What shapes that were not tuned may lose, and on which of the tuned ones most; or nothing.

    Each tuned one, left out, is served by what the others have.
    """
    known = [(row.unseen_regret, row.problem) for row in rows if row.unseen_regret is not None]
    if not known:
        return []
    mean = geometric_mean(1 + regret for regret, _ in known) - 1
    worst, problem = max(known)
    return [
        f"{100 * mean:.1f} % (geometric mean of {len(known)});",
        f"worst {100 * worst:.1f} %: {title(problem)}",
    ]


def write_module(module: Export, path: Path) -> Path:
    """Write the module whole or not at all, a package where `path` has no suffix; its main file.

    A package of an earlier export is replaced. Raises ExportError.
    """
    if path.suffix not in ("", ".py"):
        raise ExportError(f"{path}: the module's name must end in .py, or be a folder's")
    if not path.stem.isidentifier() or iskeyword(path.stem):
        raise ExportError(f"{path}: {path.stem} is no name of a Python module")
    try:
        if path.suffix:
            write_whole(path, module.text)
            return path
        return _write_package(module, path)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from None


def _write_package(module: Export, folder: Path) -> Path:
    main = folder / "__init__.py"
    if folder.exists() and not (main.is_file() and MADE_BY in main.read_text(errors="replace")):
        raise ExportError(f"{folder}: exists and is no package that `autoflash export` wrote")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as made:
        new = Path(made) / folder.name
        (new / KERNELS_FOLDER).mkdir(parents=True)
        write_whole(new / "__init__.py", module.package_text)
        for name, text in module.kernels.items():
            write_whole(new / KERNELS_FOLDER / f"{name}.py", text)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    return main


def _reason_to_leave_out(winner: Winner, gpus: Sequence[str], allow_predicted: bool) -> str | None:
    decision = winner.decision
    if gpus and not {winner.gpu.name, winner.gpu.slug} & set(gpus):
        return "of a GPU that was not asked for"
    if decision.source == "predicted" and not allow_predicted:
        return "predicted, not measured (--allow-predicted exports such rows)"
    reason = why_refused(decision.problem, decision.winner, winner.gpu)
    if reason:
        return f"the config is not valid: {reason}"
    variant = FAMILIES[decision.winner.family].variant(decision.problem)
    if render(variant).digest != decision.kernel_digest:
        return "stale: the kernel's text has changed since it was measured"
    return None


def _portfolios(
    winners: Iterable[Winner], most_configs: int
) -> tuple[list[ExportedProblem], Reaches]:
    groups: dict[tuple[Any, ...], list[Winner]] = defaultdict(list)
    for winner in winners:
        decision = winner.decision
        key = (winner.gpu, winner.toolchain.triton, decision.source, match_key(decision.problem))
        groups[key].append(winner)
    found: list[tuple[Winner, Served, Unseen]] = []
    for group in groups.values():
        measured = [_measured(winner) for winner in group]
        served = choose_portfolio(measured, most_configs)
        left_out = unseen(measured, most_configs, partial(_valid, group[0].gpu))
        found += zip(group, served, left_out, strict=True)
    reaches = _reaches(found)
    rows = [
        ExportedProblem(
            winner.gpu,
            winner.toolchain,
            one.problem,
            one.config,
            winner.decision.source,
            one.regret,
            left_out.regret(reaches[_table_of(winner)][one.problem.op]),
        )
        for winner, one, left_out in found
    ]
    return sorted(rows, key=lambda row: (row.gpu.slug, row.gpu.identity, row.problem)), reaches


def _reaches(found: Iterable[tuple[Winner, Served, Unseen]]) -> Reaches:
    """How near a tuned problem must be to serve others, by table and op."""
    of_op: dict[tuple[Gpu, str], dict[str, list[Unseen]]] = defaultdict(lambda: defaultdict(list))
    for winner, one, left_out in found:
        of_op[_table_of(winner)][one.problem.op].append(left_out)
    return {
        table: {op: reach_of(several) for op, several in sorted(ops.items())}
        for table, ops in of_op.items()
    }


def _table_of(winner: Winner) -> tuple[Gpu, str]:
    """The GPU and version of triton in whose table a winner's row stands."""
    return winner.gpu, winner.toolchain.triton


def _measured(winner: Winner) -> Measured:
    """The decision's times, without configs that the family would refuse for this problem."""
    decision = winner.decision
    times = {
        config: us
        for config, us in decision.times
        if why_refused(decision.problem, config, winner.gpu) is None
    }
    times[decision.winner] = decision.winner_us
    default = _modules_default(decision.problem, winner.gpu)
    return Measured(decision.problem, decision.winner, times, winner.weight, default)


def _modules_default(problem: Problem, gpu: Gpu) -> Config | None:
    """What a module of all families has for a problem that no row serves."""
    names = SELECTION_FAMILIES["latent decode" if problem.latent else problem.op]
    served = (FAMILIES[name] for name in names)
    defaults = (each.default(problem, gpu) for each in served if not each.unsupported(problem, gpu))
    return next(defaults, None)


def _valid(gpu: Gpu, problem: Problem, config: Config) -> bool:
    return why_refused(problem, config, gpu) is None


def _head_text(winners: Sequence[Winner], rows: Sequence[ExportedProblem]) -> str:
    """What a module begins with: all that the tables are for."""
    imports, bodies = joined_runtime()
    unseen = unseen_loss(rows)
    told = [f"Had it not been tuned, a problem would lose {line}" for line in unseen[:1]]
    docstring = DOCSTRING.format(
        functions="prefill(), decode(), append_kv() and merge()",
        made_by=MADE_BY,
        version=__version__,
        provenance="\n".join([*_provenance(winners), *told, *unseen[1:]]),
    )
    public = f"__all__ = {list(PUBLIC)!r}\n\n".replace("'", '"')
    future = "from __future__ import annotations\n"
    return "\n".join([docstring, future, imports, public, bodies, "", ""])


def _signed(text: str, beside: str = "") -> str:
    """The text with its operators, in a namespace that tells it, and what is `beside`, apart."""
    digest = hashlib.sha256((text + beside).encode()).hexdigest()[:12]
    text += f'register_operators("autoflash_{digest}", prefill, decode, append_kv, merge)\n'
    if not (text + beside).isascii():
        raise ExportError("the module would not be ASCII: a GPU's name or a template is not")
    return text


def _provenance(winners: Sequence[Winner]) -> list[str]:
    lines = set()
    for winner in winners:
        chain = winner.toolchain
        lines.add(
            f"{winner.gpu.name} ({winner.gpu.arch}): {winner.decision.source} with driver"
            f" {chain.driver or 'none'}, torch {chain.torch}, triton {chain.triton}."
        )
    return sorted(lines)


def _variants(rows: Sequence[ExportedProblem]) -> dict[tuple[str, ...], Variant]:
    """Those that the module carries, by family and the switches that are on."""
    used = {row.config.family for row in rows}
    # of each op the family whose default serves what no row does; a backward where one was tuned
    return _names(
        used | {"prefill", "decode", "decode_latent"} | {FAMILIES[name].op for name in used},
        rows,
    )


def _tables_text(
    winners: Sequence[Winner],
    rows: Sequence[ExportedProblem],
    reaches: Reaches,
    names: Mapping[tuple[str, ...], Variant],
) -> str:
    """The names of kernels, and a table of integers a GPU and triton version."""
    triton_of = {(w.gpu, w.decision.problem): w.toolchain.triton for w in winners}
    knobs = sorted({row.config.knobs for row in rows}, key=repr)
    lines = ["_NAMES = {  # (family, its switches that are on)"]
    lines += [f"    {key!r}: {render(names[key]).name!r}," for key in sorted(names)]
    lines += ["}", "_KNOBS = ("]
    lines += [f"    {dict(each)!r}," for each in knobs]
    lines += [")", "_GPUS = ("]
    tables: dict[tuple[Gpu, str], list[ExportedProblem]] = defaultdict(list)
    for row in rows:
        tables[row.gpu, triton_of[row.gpu, row.problem]].append(row)
    newest_first = sorted(tables, key=lambda key: _version(key[1]), reverse=True)
    for gpu, triton in sorted(newest_first, key=lambda key: key[0].slug):
        lines += [
            "    GpuTable(",
            f"        {_device(gpu)!r},",
            f"        {triton!r},",
            "        (",
        ]
        lines += [f"            {_row(row, knobs)}," for row in tables[gpu, triton]]
        finite = {op: far for op, far in reaches[gpu, triton].items() if far < float("inf")}
        lines += ["        ),", f"        {finite!r},", "    ),"]
    lines += [")", "", "install_tables(Tables(_TEXTS, _NAMES, _GPUS))", ""]
    return "\n".join(lines)


def _texts_text(texts: Mapping[str, str]) -> str:
    """The texts by name, of pieces that many of them share: a function each, as a rule."""
    pieces = sorted({piece for text in texts.values() for piece in text.split(APART)})
    places = {piece: place for place, piece in enumerate(pieces)}
    lines = ["_PIECES = ("]
    lines += [f"    {_literal(piece)},  # {place}" for piece, place in places.items()]
    lines += [")", "_TEXTS = {", f"    name: {APART!r}.join(_PIECES[place] for place in places)"]
    lines += ["    for name, places in {"]
    for name in sorted(texts):
        of_text = [places[piece] for piece in texts[name].split(APART)]
        lines.append(f"        {name!r}: {of_text!r},")
    return "\n".join([*lines, "    }.items()", "}", ""])


def _names(
    families: Iterable[str], rows: Sequence[ExportedProblem]
) -> dict[tuple[str, ...], Variant]:
    """Every variant of the families and of what is not tuned, by name and switches that are on.

    Masks with modifiers, custom ones, dropout and values of another width with most modifiers, and
    gradients of packed sequences with a bias are those of the rows. Of these the portable family
    has each too: its default serves where no row's config can.
    """
    beyond = [
        (name, row.problem)
        for row in rows
        if row.problem.masks
        or row.problem.dropout
        or "head_dim_v" in row.problem.switches
        or {"bias", "varlen"}.issubset(row.problem.switches)
        for name in (row.config.family, FAMILIES[row.config.family].op)
        if FAMILIES[name].unsupported(row.problem, row.gpu) is None
    ]
    every = [(name, problem) for name in sorted(families) for problem in samples(FAMILIES[name])]
    tuned = {
        (name, *problem.switches): FAMILIES[name].variant(problem)
        for name, problem in [*every, *beyond]
    }
    return tuned | {(each.family, *each.switches): each for each in untuned_variants().values()}


def _row(row: ExportedProblem, knobs: Sequence[Any]) -> str:
    problem, config = row.problem, row.config
    key, sizes = match_key(problem), tuple(match_sizes(problem))
    place = knobs.index(config.knobs)
    regret = round(row.regret, 4)
    served = f"{config.family!r}, _KNOBS[{place}], {regret!r}, {problem.num_kv_heads}"
    return f"Row({key!r}, MatchSizes{sizes!r}, {served})"


def _device(gpu: Gpu) -> Device:
    return Device(**{name: getattr(gpu, name) for name in Device._fields})


def _literal(text: str) -> str:
    """A readable string literal of exactly this text."""
    if "\\" in text or "'''" in text or text.endswith("'"):
        return repr(text)
    return f"'''{text}'''"


def _version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())

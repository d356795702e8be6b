"""Workload: the problems of one YAML file with their weights, every mistake told by file and key.

`WorkloadFile` is the format; docs/workloads.md describes it and `autoflash schema` prints it for
editors. Every shape key of an entry may hold one value or a list: lists expand to their product,
and each problem of the product has the entry's weight. A problem that is given twice is one problem
with the weights added.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails

from autoflash.errors import WorkloadError
from autoflash.problem import Problem, ProblemError
from autoflash.runtime.problem import UNTOLD_DENSITY, reached_window

MAX_FILE_BYTES = 1 << 20
MAX_PROBLEMS = 4096
MAX_MISTAKES = 20  # of a file that is something else entirely, the first lines are enough
INT32_MAX = 2**31 - 1  # lengths and counts are int32 on the device
ENTRY_ONLY = ("weight", "training")  # what is not a problem's field, and no list
MASK_BLOCK = 128  # queries and keys of a block of torch's BlockMask, unless it is told another
SHARED_KEYS = ("num_heads", "num_kv_heads", "head_dim", "dtype")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Workload:
    """Each problem once, in the file's order, with its weight: how often it is called, any unit."""

    name: str
    problems: tuple[tuple[Problem, float], ...]


def load_workload(path: Path | str) -> Workload:
    """The workload of a YAML file. Raises WorkloadError, one line a mistake: file, key, reason."""
    path = Path(path)
    raw = _read(path)
    if raw is None:
        raise WorkloadError(f"{path.name}: is empty")
    try:
        parsed = WorkloadFile.model_validate(raw)
    except ValidationError as error:
        mistakes = [_mistake(raw, details) for details in error.errors()]
        raise _refusal(path.name, mistakes) from None
    return Workload(parsed.name or path.stem, tuple(_expand(path.name, parsed).items()))


def workload_schema() -> dict[str, Any]:
    """The JSON Schema of a workload file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **WorkloadFile.model_json_schema(),
    }


class _OneOrMany:
    """Makes a list type accept a single item too, in validation and in the schema."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


OneOrMany = Annotated[
    list[Item],
    Field(min_length=1),
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    _OneOrMany(),
]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
NotNegative = Annotated[int, Field(ge=0, le=INT32_MAX)]
Side = Annotated[int, Field(ge=-1, le=INT32_MAX)]  # of a window; -1 is unbounded
Percent = Annotated[int, Field(ge=1, le=100)]
Text = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Literal["bf16", "fp16", "fp32"]
KvDtype = Literal["bf16", "fp16", "fp32", "fp8_e4m3", "int8"]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Model(_Strict):
    """What the entries of one model share; an entry may say otherwise. An empty list: not given."""

    num_heads: OneOrMany[Positive] = Field(default_factory=list)
    num_kv_heads: OneOrMany[Positive] = Field(default_factory=list)
    head_dim: OneOrMany[Positive] = Field(default_factory=list)
    dtype: OneOrMany[Dtype] = Field(default_factory=list)


class PrefillEntry(Model):
    """Prompts: `seqlen_q` tokens attending to `seqlen_k`, by default as many.

    With `training` each is two problems: its backward is one of its own, whose bits repeat where it
    is `deterministic`.
    """

    batch: OneOrMany[Positive] = Field(default=[1])
    seqlen_q: OneOrMany[Positive]
    seqlen_k: OneOrMany[Positive] = Field(default_factory=list)
    causal: OneOrMany[bool] = Field(default=[True])
    layout: OneOrMany[Literal["bshd", "bhsd", "thd"]] = Field(default=["bshd"])
    lengths: OneOrMany[Literal["equal", "ragged"]] = Field(default=["equal"])
    window_left: OneOrMany[Side] = Field(default=[-1])
    window_right: OneOrMany[Side] = Field(default=[-1])
    softcap: OneOrMany[bool] = Field(default=[False])
    alibi: OneOrMany[bool] = Field(default=[False])
    bias: OneOrMany[bool] = Field(default=[False])
    sinks: OneOrMany[bool] = Field(default=[False])
    dropout: OneOrMany[bool] = Field(default=[False])
    head_dim_v: OneOrMany[Positive] = Field(default_factory=list)
    mask: OneOrMany[Text] = Field(default_factory=list)
    masked_by: OneOrMany[Literal["blocks", "documents", "prefix"]] = Field(default_factory=list)
    density: OneOrMany[Percent] = Field(default_factory=list)
    mask_block_q: OneOrMany[Positive] = Field(default_factory=list)
    mask_block_k: OneOrMany[Positive] = Field(default_factory=list)
    page_size: OneOrMany[NotNegative] = Field(default=[0])
    kv_layout: OneOrMany[Literal["nhd", "hnd"]] = Field(default=["nhd"])
    pages: OneOrMany[Literal["permuted", "contiguous", "shared"]] = Field(default_factory=list)
    deterministic: OneOrMany[bool] = Field(default=[False])
    training: bool = False
    weight: Weight = 1.0


class DecodeEntry(Model):
    """Decode steps: `seqlen_q` tokens over caches of `seqlen_k`; `page_size` 0 is contiguous."""

    batch: OneOrMany[Positive] = Field(default=[1])
    seqlen_q: OneOrMany[Positive] = Field(default=[1])
    seqlen_k: OneOrMany[Positive]
    page_size: OneOrMany[NotNegative] = Field(default=[0])
    kv_layout: OneOrMany[Literal["nhd", "hnd"]] = Field(default=["nhd"])
    lengths: OneOrMany[Literal["equal", "ragged", "captured"]] = Field(default=["equal"])
    pages: OneOrMany[Literal["permuted", "contiguous", "shared", "chosen"]] = Field(
        default_factory=list
    )
    head_dim_v: OneOrMany[Positive] = Field(default_factory=list)
    kv_dtype: OneOrMany[KvDtype] = Field(default_factory=list)
    kv_scales: OneOrMany[Literal["tensor", "head", "token"]] = Field(default_factory=list)
    window_left: OneOrMany[Side] = Field(default=[-1])
    softcap: OneOrMany[bool] = Field(default=[False])
    alibi: OneOrMany[bool] = Field(default=[False])
    bias: OneOrMany[bool] = Field(default=[False])
    sinks: OneOrMany[bool] = Field(default=[False])
    mask: OneOrMany[Text] = Field(default_factory=list)
    masked_by: OneOrMany[Literal["blocks", "documents", "prefix"]] = Field(default_factory=list)
    density: OneOrMany[Percent] = Field(default_factory=list)
    mask_block_k: OneOrMany[Positive] = Field(default_factory=list)
    weight: Weight = 1.0


class WorkloadFile(_Strict):
    """An autoflash workload: which attention shapes to tune, and how often each is called."""

    name: Annotated[str, Field(min_length=1)] = Field(default_factory=str)
    model: Model = Model()
    prefill: list[PrefillEntry] = Field(default=[])
    decode: list[DecodeEntry] = Field(default=[])


ENTRY_TYPES: dict[str, type[Model]] = {"prefill": PrefillEntry, "decode": DecodeEntry}


def _expand(file: str, parsed: WorkloadFile) -> dict[Problem, float]:
    """The weight of every problem, in the file's order."""
    weights: dict[Problem, float] = {}
    mistakes = []
    for op, entries in (("prefill", parsed.prefill), ("decode", parsed.decode)):
        for number, entry in enumerate(entries):
            where = f"{op}[{number}]"
            values = _values(entry, parsed.model)
            absent = [key for key in SHARED_KEYS if key not in values]
            mistakes += [f"{where}: {key} is given neither here nor in model" for key in absent]
            size = math.prod(len(choices) for choices in values.values())
            size *= 2 if _trains(entry) else 1
            if len(weights) + size > MAX_PROBLEMS:
                raise WorkloadError(
                    f"{file}: {where}: its lists expand to {size} problems; "
                    f"a workload may have {MAX_PROBLEMS} in all"
                )
            try:
                for problem in () if absent else _problems(op, values):
                    for each in _with_backward(problem, entry):
                        weights[each] = weights.get(each, 0.0) + entry.weight
            except ProblemError as error:  # one mistake an entry: the rest of it is alike
                mistakes.append(f"{where}: {error}")
    if not (weights or mistakes):
        mistakes.append("prefill, decode: neither has an entry, so there is nothing to tune")
    if mistakes:
        raise _refusal(file, mistakes)
    return weights


def _trains(entry: PrefillEntry | DecodeEntry) -> bool:
    return isinstance(entry, PrefillEntry) and entry.training


def _with_backward(problem: Problem, entry: PrefillEntry | DecodeEntry) -> tuple[Problem, ...]:
    if _trains(entry):
        if problem.paged:
            raise ProblemError(f"page_size {problem.page_size}: no backward has keys in pages yet")
        return replace(problem, deterministic=False), replace(problem, op="backward")
    if problem.deterministic:
        raise ProblemError("deterministic is for training: without, equal calls give equal bits")
    return (problem,)


def _refusal(file: str, mistakes: list[str]) -> WorkloadError:
    if len(mistakes) > MAX_MISTAKES:
        mistakes = [*mistakes[:MAX_MISTAKES], f"{len(mistakes) - MAX_MISTAKES} more mistakes"]
    return WorkloadError("\n".join(f"{file}: {mistake}" for mistake in mistakes))


def _values(entry: PrefillEntry | DecodeEntry, model: Model) -> dict[str, list[Any]]:
    """The choices of each key that is given, by the entry or else by the model."""
    given = [*model, *((key, choices) for key, choices in entry if key not in ENTRY_ONLY)]
    return {key: choices for key, choices in given if choices}


def _problems(op: str, values: dict[str, list[Any]]) -> Iterator[Problem]:
    for choice in product(*values.values()):
        fields = dict(zip(values, choice, strict=True))
        fields.setdefault("seqlen_k", fields["seqlen_q"])
        if "masked_by" in fields:
            fields.setdefault("density", UNTOLD_DENSITY)
        if fields.get("masked_by") == "blocks":
            for size in ("mask_block_q", "mask_block_k"):
                fields.setdefault(size, MASK_BLOCK)
        yield reached_window(Problem(op=op, **fields))


def _mistake(raw: Any, details: ErrorDetails) -> str:
    """`key: reason` of one of pydantic's errors, in the words of the file."""
    location = list(details["loc"])
    if details["type"] == "extra_forbidden":
        unknown = str(location.pop())
        near = difflib.get_close_matches(unknown, _known_keys(location), n=1)
        hint = f"did you mean {near[0]}?" if near else _listing(_known_keys(location))
        return ": ".join(filter(None, [_key(location), f"unknown key {unknown}; {hint}"]))
    if location and isinstance(location[-1], int) and not isinstance(_at(raw, location[:-1]), list):
        location.pop()  # a single value standing for a list of itself
    return ": ".join(filter(None, [_key(location), _reason(details)]))


def _reason(details: ErrorDetails) -> str:
    given, limits = _spelled(details["input"]), details.get("ctx", {})
    match details["type"]:
        case "invalid_key":
            return "unknown key; a key is a word"
        case "missing":
            return "is missing"
        case "too_short":
            return "the list is empty"
        case "list_type":
            return f"{given} is not a list"
        case "model_type":
            return f"{given} is not a mapping of keys to values"
        case "int_type":
            return f"{given} is not an integer"
        case "float_type" | "finite_number":
            return f"{given} is not a finite number"
        case "bool_type":
            return f"{given} is not true or false"
        case "string_type" | "string_too_short":
            return f"{given} is not a name"
        case "literal_error":
            return f"{given} is none of {limits['expected'].replace(chr(39), '')}"
        case "greater_than_equal" if limits["ge"] == 0:
            return f"{given} is negative"
        case "greater_than_equal" if limits["ge"] == -1:
            return f"{given} is neither a number of keys nor -1 for unbounded"
        case "greater_than_equal" | "greater_than":
            return f"{given} is not positive"
        case "less_than_equal":
            return f"{given} is more than {limits['le']}"
        case _:
            return f"{given}: {details['msg']}"


def _key(location: list[int | str]) -> str:
    """`decode[3].batch[0]` of ("decode", 3, "batch", 0)."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in location]
    return "".join(steps).removeprefix(".")


def _at(raw: Any, location: list[int | str]) -> Any:
    for step in location:
        raw = raw[step]
    return raw


def _known_keys(location: list[int | str]) -> list[str]:
    """The keys of the mapping at `location`."""
    match location:
        case []:
            return list(WorkloadFile.model_fields)
        case [section, _] if section in ENTRY_TYPES:
            return list(ENTRY_TYPES[section].model_fields)
        case _:
            return list(Model.model_fields)


def _listing(keys: list[str]) -> str:
    return f"known are {', '.join(sorted(keys))}"


def _spelled(value: Any) -> str:
    """A value as its file has it, in a few words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            text = repr(value)
            return text if len(text) <= 40 else f"{text[:37]}..."


def _read(path: Path) -> Any:
    """What the file holds, as plain Python values."""
    if path.is_dir():
        raise WorkloadError(f"{path}: is a folder; a workload is one YAML file")
    try:
        content = path.read_bytes()
        if len(content) > MAX_FILE_BYTES:
            raise WorkloadError(f"{path.name}: is larger than {MAX_FILE_BYTES} bytes")
        return yaml.load(content, Loader=_Loader)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise WorkloadError(f"{path.name}: {where}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # not text, or a date or number that is none
        reason = str(error).splitlines()[0]
        raise WorkloadError(f"{path.name}: not YAML: {reason}") from None
    except RecursionError:
        raise WorkloadError(f"{path.name}: not YAML: nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """safe_load, refusing a key that is given twice; YAML would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep)

"""Problem: one attention shape and its semantics, validated; the key of every measurement."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .mask_rule import normal_rule, rule_digest

OPS = ("prefill", "decode", "backward")
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
QUANTISED_BYTES = {"fp8_e4m3": 1, "int8": 1}
KV_DTYPE_BYTES = {**DTYPE_BYTES, **QUANTISED_BYTES}
LAYOUTS = ("bshd", "bhsd", "thd")  # thd: sequences packed one after the other
KV_LAYOUTS = ("nhd", "hnd")
LENGTHS = ("equal", "ragged", "captured")  # in the order of rows
CHOSEN = "chosen"
PAGES = ("permuted", "contiguous", "shared", CHOSEN)
KV_SCALES = ("tensor", "head", "token")
MODIFIERS = ("softcap", "alibi", "bias", "sinks", "dropout")
MASKED_BY = ("blocks", "documents", "prefix")
STEP_BLOCK_Q = 128  # stored of blocks in decode, whose query tokens are all of one block
UNTOLD_DENSITY = 10  # percent, where the caller gives none: reading it would wait for the device
LATENT_WIDTHS = 576, 512  # of keys, and of values, which are the keys' first channels
NONE = "none"  # the pages of a cache without any, scales of one that is not quantised, masks


class ProblemError(ValueError):
    """A shape or an argument that attention is not defined for; names it, and what was given."""


@dataclass(frozen=True, order=True)
class Problem:
    """One shape and its semantics. Lengths are in tokens; `page_size` 0 is a contiguous cache.

    `backward` is that of a prefill, whose fields it has.

    `seqlen_k` is the longest sequence of the batch; with `lengths` "ragged" the others lie between
    an eighth of it and it, and those of a decode that a CUDA graph was "captured" of are others at
    each replay: from a 64th of it to it, as many short as long ones, one in eight of a batch empty.
    `pages` says where a sequence's pages lie: anywhere ("permuted"), one
    after the other ("contiguous"), or anywhere but the first half of `seqlen_k` ("shared"), which
    all sequences have in common; or that `seqlen_k` keys in some pages of longer sequences are read
    ("chosen"). `kv_scales` says what one scale of a quantised cache is for: all
    of K ("tensor"), a KV head, or a KV head of one token ("token"); V has its own.

    With the layout "thd" (prefill) `seqlen_q` and `seqlen_k` are those of the longest sequences and
    `lengths` speaks of both. Of a prefill over keys in pages, which all are a cache's, `lengths`
    speaks of the keys: no sequence has fewer than queries, unless `seqlen_k` is less.

    A query at position p sees the keys from p - `window_left` to p + `window_right`; -1 is
    unbounded. Causal ends a window at p, and a window that ends there is causal: it is stored so,
    with `window_right` -1. `softcap`, `alibi`, `bias`, `sinks` and `dropout` say that there is such
    a thing; its values are arguments. `dropout` is of training: not of decode.

    `masked_by` says what else a mask is made of: "blocks", an index of blocks of `mask_block_q`
    queries and `mask_block_k` keys, those that are there, some of them whole;
    "documents", an id for each token, of one of which a query and the keys it sees are; or
    "prefix", first keys of each sequence that all its queries see: of one query token in decode,
    which sees all keys, it is nothing. `density` is how many percent of the blocks there are, of
    the keys a document has, or the prefix is. `mask` is a rule: an expression of b, h, q_idx and
    kv_idx, which holds where a key is seen. The rule and causal hide in blocks that are not whole.

    Decode of latent attention has one KV head of `head_dim` 576, whose first 512 channels, its
    `head_dim_v`, are V too.

    An empty `kv_dtype` or `out_dtype` and a zero `head_dim_v` mean "as the query's"; `pages` is
    "permuted" and `kv_scales` "tensor" where they are empty. `decode` is causal by definition and
    ignores `layout`, the others ignore `kv_layout` without pages, a cache without pages ignores
    `pages`; what is ignored is stored in one spelling, so that equal problems are equal keys.

    Raises ProblemError naming the field.
    """

    op: str
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    causal: bool = True
    page_size: int = 0
    layout: str = "bshd"
    kv_layout: str = "nhd"
    lengths: str = "equal"
    kv_dtype: str = ""
    out_dtype: str = ""
    acc_dtype: str = "fp32"
    head_dim_v: int = 0
    deterministic: bool = False
    batch_invariant: bool = False
    pages: str = ""
    kv_scales: str = ""
    window_left: int = -1
    window_right: int = -1
    softcap: bool = False
    alibi: bool = False
    bias: bool = False
    sinks: bool = False
    mask: str = ""
    masked_by: str = ""
    density: int = 0
    mask_block_q: int = 0
    mask_block_k: int = 0
    dropout: bool = False

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "kv_dtype", self.kv_dtype or self.dtype)
        fill(self, "out_dtype", self.out_dtype or self.dtype)
        fill(self, "head_dim_v", self.head_dim_v or self.head_dim)
        if not self.paged:
            fill(self, "pages", NONE)
        elif self.pages in ("", NONE):
            fill(self, "pages", PAGES[0])
        if self.kv_scales in ("", NONE):
            fill(self, "kv_scales", KV_SCALES[0] if self.quantised else NONE)
        if self.op == "decode":
            fill(self, "causal", True)
            fill(self, "layout", "bshd")
            fill(self, "mask_block_q", STEP_BLOCK_Q if self.masked_by == "blocks" else 0)
        elif not self.paged:
            fill(self, "kv_layout", "nhd")
        fill(self, "masked_by", self.masked_by or NONE)
        if self.mask:
            try:
                fill(self, "mask", normal_rule(self.mask))
            except ValueError as error:
                raise ProblemError(str(error)) from None
        if self.window_right == 0:
            fill(self, "causal", True)
        if self.causal and self.window_right >= 0:
            fill(self, "window_right", -1)
        reason = problem_error(self)
        if reason:
            raise ProblemError(reason)
        if self.op == "decode" and self.seqlen_q == 1 and self.masked_by == "prefix":
            fill(self, "masked_by", NONE)  # the last token sees all keys anyway
            fill(self, "density", 0)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    @property
    def varlen(self) -> bool:
        """Whether sequences of any lengths stand one after the other, without an axis of theirs."""
        return self.layout == "thd"

    @property
    def latent(self) -> bool:
        """Whether values are channels of the keys, in a cache that holds both once."""
        return self.op == "decode" and (self.head_dim, self.head_dim_v) == LATENT_WIDTHS

    @property
    def windowed(self) -> bool:
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def window(self) -> tuple[int, int]:
        """How many keys before and after its own position a query sees at most; -1 unbounded."""
        return self.window_left, 0 if self.causal else self.window_right

    @property
    def modifiers(self) -> tuple[str, ...]:
        """What changes scores, their sum or what is made of them, of what is on."""
        return tuple(name for name in MODIFIERS if getattr(self, name))

    @property
    def masks(self) -> tuple[str, ...]:
        """What hides keys beside causal and windows, of what is on."""
        return (self.masked_by,) * (self.masked_by != NONE) + ("mask",) * bool(self.mask)

    @property
    def quantised(self) -> bool:
        return self.kv_dtype in QUANTISED_BYTES

    @property
    def switches(self) -> tuple[str, ...]:
        """The switches that are on, of those that decide a kernel's text."""
        on = {
            # a window's right edge is an argument, and causal one place for it
            "causal": self.op != "decode" and self.causal and not self.windowed,
            "window": self.windowed,
            **dict.fromkeys(self.modifiers, True),
            self.masked_by: self.masked_by != NONE,
            "head_dim_v": self.op != "decode" and self.head_dim_v != self.head_dim,
            "varlen": self.varlen,
            "paged": self.paged,
            CHOSEN: self.pages == CHOSEN,
            "queries": self.op == "decode" and self.seqlen_q > 1,
            "quantised": self.quantised,
            "token_scales": self.kv_scales == "token",
            f"mask_{rule_digest(self.mask)}": bool(self.mask),
        }
        return tuple(name for name, is_on in on.items() if is_on)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_dtype_bytes(self) -> int:
        return KV_DTYPE_BYTES[self.kv_dtype]


def reached_window(p: Problem) -> Problem:
    """The problem with every side of its window unbounded that reaches all keys of every query.

    Such a window hides nothing, and kernels without one are faster. Not in decode, where it costs
    nothing and a cache may hold more keys in the next step.
    """
    if p.op == "decode":
        return p
    left = -1 if p.window_left >= p.seqlen_k - 1 else p.window_left
    right = -1 if p.window_right >= p.seqlen_q - 1 else p.window_right
    return replace(p, window_left=left, window_right=right)


PROBLEM_FIELDS = tuple(field.name for field in fields(Problem))


def problem_error(p: Problem) -> str | None:
    """Why the fields of `p` do not make a problem, or None."""
    for name, allowed in (
        ("op", OPS),
        ("dtype", DTYPE_BYTES),
        ("kv_dtype", KV_DTYPE_BYTES),
        ("out_dtype", DTYPE_BYTES),
        ("acc_dtype", ("fp32",)),
        ("layout", LAYOUTS),
        ("kv_layout", KV_LAYOUTS),
        ("lengths", LENGTHS),
        ("pages", PAGES if p.paged else (NONE,)),
        ("kv_scales", (NONE, *KV_SCALES)),
        ("masked_by", (NONE, *MASKED_BY)),
    ):
        if getattr(p, name) not in allowed:
            return f"{name} {getattr(p, name)!r} is none of {', '.join(allowed)}"
    if p.kv_scales != NONE and not p.quantised:
        return f"kv_scales {p.kv_scales!r} is for a quantised cache, kv_dtype is {p.kv_dtype}"
    for name in ("window_left", "window_right"):
        if getattr(p, name) < -1:
            return f"{name} {getattr(p, name)} is neither a number of keys nor -1 for unbounded"
    if p.alibi and p.bias:
        return "alibi and bias exclude each other: the slopes can be added into the bias"
    if p.dropout and (p.op == "decode" or p.paged):
        return "dropout is of training: there is none in decode, nor over pages"
    if p.lengths == "captured" and (p.op != "decode" or p.pages == CHOSEN):
        return "lengths 'captured' are of a decode step over whole sequences"
    if p.pages == CHOSEN and p.op != "decode":
        return f"pages {CHOSEN!r} are of decode: {p.op} reads all pages of a sequence"
    for name in ("batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "seqlen_q"):
        if getattr(p, name) < 1:
            return f"{name} {getattr(p, name)} is not positive"
    if p.seqlen_k < 0 or p.page_size < 0:
        return f"seqlen_k {p.seqlen_k} and page_size {p.page_size} must not be negative"
    if p.num_heads % p.num_kv_heads:
        return f"num_heads {p.num_heads} is not a multiple of num_kv_heads {p.num_kv_heads}"
    if p.latent and p.num_kv_heads != 1:
        return f"num_kv_heads {p.num_kv_heads}: latent attention has one"
    if not p.latent and (p.head_dim % 8 or not 16 <= p.head_dim <= 256):
        wide = (
            "; decode has 576 with head_dim_v 512" if p.op == "decode" and p.head_dim > 256 else ""
        )
        return f"head_dim {p.head_dim} is not a multiple of 8 from 16 to 256{wide}"
    if p.op == "decode" and p.seqlen_q > 16:
        return (
            f"seqlen_q {p.seqlen_q} is more than the 16 query tokens a decode step may have;"
            " prefill has any number, over pages too"
        )
    return _mask_error(p)


def _mask_error(p: Problem) -> str | None:
    """Why the masks do not make a problem, or None."""
    if p.masked_by == "blocks" and p.pages == CHOSEN:
        return "blocks and chosen pages exclude each other: both say which keys are read"
    if p.masked_by == "blocks" and p.varlen:
        return "blocks: packed sequences take documents, prefixes and rules of such masks"
    if p.masked_by in ("blocks", "prefix") and p.windowed:
        return f"{p.masked_by} and a window exclude each other"
    if p.masked_by == "prefix" and not p.causal:
        return "prefix: what is beyond it is causal, so causal must be true"
    if (p.masked_by == NONE) != (p.density == 0) or not 0 <= p.density <= 100:
        return f"density {p.density} is not from 1 to 100 percent, or 0 without masked_by"
    blocks = (p.mask_block_q, p.mask_block_k)
    if p.masked_by != "blocks" and blocks != (0, 0):
        return "mask_block_q and mask_block_k are for a mask of blocks"
    if p.masked_by == "blocks" and any(size % 16 or not 16 <= size <= 65536 for size in blocks):
        return f"blocks of {blocks[0]} by {blocks[1]}: sizes are multiples of 16 up to 65536"
    return None

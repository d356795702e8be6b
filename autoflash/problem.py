"""Variant: the structural switches that decide a kernel's text."""

from dataclasses import dataclass, fields

from autoflash.rule import in_triton
from autoflash.runtime.mask_rule import rule_digest
from autoflash.runtime.problem import MASKED_BY, MODIFIERS, Problem, ProblemError
from autoflash.title import briefs, title

BLOCK_NUMBERS = ("blocks_of_row", "tiles_of_row")  # of a decode kernel of listed blocks

__all__ = ["Problem", "ProblemError", "Variant", "briefs", "title"]


@dataclass(frozen=True, order=True)
class Variant:
    """What is rendered: booleans and enums only. Numbers belong to Config and to arguments.

    `mask` is a custom mask's expression.
    """

    family: str
    op: str
    causal: bool = False
    window: bool = False  # causal is a place of its right edge
    softcap: bool = False
    alibi: bool = False
    bias: bool = False
    sinks: bool = False
    dropout: bool = False
    blocks: bool = False  # of keys, listed for each block of queries
    documents: bool = False
    prefix: bool = False
    head_dim_v: bool = False  # v has other channels than q and k
    # of decode: what of the above is on, but for a bias, is told by arguments that may be None
    modified: bool = False
    varlen: bool = False  # sequences packed one after the other
    paged: bool = False
    queries: bool = False  # several query tokens a sequence
    quantised: bool = False
    token_scales: bool = False
    # always text; families fill all switches in from one mapping, whose values are booleans
    mask: str | bool = ""

    @property
    def head_scales(self) -> bool:
        """Whether a scale is for a KV head, or for all of them: for more than one token."""
        return self.quantised and not self.token_scales

    @property
    def modifiers(self) -> tuple[str, ...]:
        """What its kernels take beside the plain one's arguments."""
        names = ("window", *MODIFIERS, *MASKED_BY)
        return tuple(name for name in names if getattr(self, name))

    @property
    def takes_modifiers(self) -> bool:
        """Whether there is any of what a plan is given beside the plain one's arguments."""
        return bool(self.modifiers) or self.varlen

    @property
    def latent(self) -> bool:
        """Whether values are channels of the keys."""
        return self.family == "decode_latent"

    @property
    def has_swap(self) -> bool:
        """Whether a decode text has the product with sides swapped beside the plain one."""
        return not (self.quantised or self.latent)

    @property
    def chooses(self) -> bool:
        """Whether a block table may hold some of a sequence's pages alone."""
        return self.modified and self.paged

    @property
    def chunked(self) -> bool:
        """Whether it is a prefill over pages: modifiers, a bias apart, are arguments or None."""
        return self.op == "prefill" and self.paged

    @property
    def dense(self) -> bool:
        """Whether an axis of q, k and v is that of sequences."""
        return not (self.varlen or self.paged)

    @property
    def caps(self) -> bool:
        """Whether scores may be capped."""
        return self.softcap or self.modified or self.chunked

    @property
    def penalises(self) -> bool:
        """Whether distance may be taken off the scores of a prefill."""
        return self.alibi or (self.chunked and not self.bias)

    @property
    def added_to_scores(self) -> str:
        """What a decode kernel calls what it adds to scores, or takes off them."""
        return "biases" if self.bias else "slopes_log2"

    @property
    def numbers_of_step(self) -> tuple[str, ...]:
        """Numbers that a decode kernel takes for what is on, unspecialised."""
        numbers = ("seqlen_q",) * self.queries
        if not self.modified:
            return numbers
        numbers += ("reach", "visited") + ("positions_width",) * self.paged
        numbers += () if self.bias else ("stride_ab", "stride_ah")
        return numbers + ("stride_jb",) * self.documents + BLOCK_NUMBERS * self.blocks

    @property
    def told_of_keys(self) -> tuple[str, ...]:
        """What a decode kernel tells its loop of which keys are seen, and of their scores."""
        told = ("last_keys",) * self.queries
        if not self.modified:
            return told
        told += ("window_left",) * self.queries + ("reach",) + ("positions_row",) * self.paged
        told += ("softcap_log2", self.added_to_scores)
        told += (self.rows_of_rule,) if self.mask else ()
        told += ("documents",) * self.documents + ("row_places",) * self.places_apart
        return told + ("blocks", "MASK_BLOCK_K") * self.blocks

    @property
    def told_of_queries(self) -> tuple[str, ...]:
        """What it tells of query tokens to those who store its rows."""
        return ("queries", "seqlen_q") * self.queries

    @property
    def strides_of_out(self) -> tuple[str, ...]:
        return ("stride_ob", *("stride_os",) * self.queries, "stride_oh")

    @property
    def count_of_tiles(self) -> str:
        """How many tiles of keys a decode kernel reads of a sequence."""
        if self.blocks:
            head = "" if self.latent else "kv_head * batch + "
            return f"tl.load(tile_counts + {head}sequence)"
        told = "reach, visited, " if self.modified else ""
        return f"count_tiles(seqlen_k, {told}BLOCK_N)"

    @property
    def places_apart(self) -> bool:
        """Whether query tokens of a decode kernel may see keys beyond where they stand."""
        return self.prefix or (self.blocks and self.queries)

    @property
    def prefetches(self) -> bool:
        """Whether a decode kernel may know which pages it reads before it is told lengths."""
        return self.paged and not self.blocks

    @property
    def tile_at_first(self) -> str:
        """What a decode kernel's loop calls its first tile of keys, before it begins."""
        return "next_tile" if self.blocks else "tile_start"

    @property
    def tile_after(self) -> str:
        """What it calls the tile after this one."""
        return "next_tile" if self.blocks else "tile + 1"

    @property
    def position_of_rows(self) -> str:
        """What that loop calls where each row stands: the last key it sees, where not apart."""
        return "row_places" if self.places_apart else "last_keys"

    @property
    def place_of_rows(self) -> str:
        """The same in a decode kernel of documents, of one query too."""
        return "last_keys" if self.queries else "seqlen_k - 1 + 0 * heads"

    @property
    def documents_by_tiles(self) -> bool:
        """Whether documents hide keys of the tiles of queries that prefill and backward have."""
        return self.documents and self.op != "decode"

    @property
    def rows_of_rule(self) -> str:
        """What a rule is told of a decode kernel's rows: b, and h and q_idx of each."""
        return f"(sequence, heads, {self.query_of_rows})"

    @property
    def first_tile(self) -> str:
        """Where a decode kernel's tiles begin: after those that are before all windows."""
        return "tile_start + skipped" if self.modified else "tile_start"

    @property
    def end_tile(self) -> str:
        """Where they end."""
        return "tile_end + skipped" if self.modified else "tile_end"

    @property
    def query_of_rows(self) -> str:
        """What it calls the query token of each of its rows."""
        return "queries" if self.queries else "0"

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than products times a scale."""
        return self.softcap or self.alibi or self.bias

    @property
    def has_boundary(self) -> bool:
        """Whether tiles of keys may be seen in part however the lengths fall."""
        return self.causal or self.window or self.varlen or self.masked_further

    @property
    def masked_further(self) -> bool:
        """Whether a key may be hidden by more than its place."""
        return bool(self.blocks or self.documents or self.prefix or self.mask)

    @property
    def has_middle(self) -> bool:
        """Whether whole tiles of keys stand between some that are seen in part."""
        return self.window or self.documents

    @property
    def has_no_middle(self) -> bool:
        """Whether a rule may hide any of those."""
        return self.has_middle and not self.has_whole_tiles

    @property
    def has_whole_tiles(self) -> bool:
        """Whether all rows may see a whole tile of keys, as far as the kernel knows."""
        return self.blocks or not self.mask

    @property
    def masks_whole_tiles(self) -> str:
        """Whether keys are hidden in tiles that rows see whole, as in a last, ragged block."""
        if self.blocks and self.paged:
            return "True"  # a host knows no length
        return "RAGGED" if self.blocks else "False"

    @property
    def first_in_part(self) -> str:
        """The first key of the tiles that rows may see in part."""
        if not (self.mask or self.blocks):
            return "full"
        # a backward counts packed tokens among all, a forward in their own sequence
        return "first_k" if self.varlen and self.op == "backward" else "0"

    @property
    def steps_that_hide(self) -> str:
        """In which steps of a backward kernel something may be hidden beside what is not there."""
        return "RULED" if self.blocks else "EDGE"

    @property
    def head_of_rule(self) -> str:
        """What attend() of a prefill takes for a rule, beside what it takes anyway."""
        return "(batch, q_head)" if self.varlen else "q_head"

    @property
    def width_of_values(self) -> str:
        """What the kernel calls the channels of v."""
        return "HEAD_DIM_V" if self.head_dim_v else "HEAD_DIM"

    @property
    def block_of_values(self) -> str:
        """What it calls the power of two that holds them."""
        return "BLOCK_DV" if self.head_dim_v else "BLOCK_D"

    @property
    def told_of_scores(self) -> tuple[str, ...]:
        """What a kernel of a backward tells its loop of windows, softcaps and slopes."""
        told = ("window_left", "window_right") if self.window else ()
        told += ("softcap_log2",) if self.softcap else ()
        return (*told, "slope_log2") if self.alibi else told

    @property
    def told_of_hiding(self) -> tuple[str, ...]:
        """What that of dk and dv tells of dropout and of masks beyond windows."""
        told = {"dropout": "dropout", "documents": "document_ids", "prefix": "prefix"}
        named = tuple(name for switch, name in told.items() if getattr(self, switch))
        return (*named, "origin") if self.counts_in_sequences else named

    @property
    def told_of_hiding_keys(self) -> tuple[str, ...]:
        """The same of dq, and where the middle is that the last tiles leave out."""
        told = {
            "dropout": ("dropout",),
            "documents": ("document_ids", "row_ids"),
            "prefix": ("prefix",),
            "has_middle": ("full", "full_end"),
        }
        return tuple(name for on, names in told.items() if getattr(self, on) for name in names)

    @property
    def told_of_rule(self) -> tuple[str, ...]:
        """What that of dq tells of where a rule and documents count from."""
        told = ("q_head",) if self.mask else ()
        return (*told, "origin") if self.counts_in_sequences else told

    @property
    def told_of_sums(self) -> tuple[str, ...]:
        """What that of dk and dv tells of where dq is added up."""
        told = ("dq_sums", "head", "padded_q") if self.single_pass else ()
        return (*told, "shift") if self.single_pass and self.varlen else told

    @property
    def counts_in_sequences(self) -> bool:
        """Whether a backward's loops are told where their sequence's own tokens begin."""
        return self.varlen and bool(self.mask or self.documents)

    @property
    def number_of_sequence(self) -> str:
        """What a backward calls the sequence, in whose batch all that is packed is one."""
        return "sequence" if self.varlen else "batch"

    @property
    def tile_of_keys(self) -> str:
        """The number of a tile of keys among all, by which its range of queries is found."""
        return "tile" if self.varlen else "(batch * tiles + start_n // BLOCK_N)"

    @property
    def tile_of_rows(self) -> str:
        """That of a tile of queries in a backward."""
        return "tile" if self.varlen else "(batch * tiles + tile)"

    @property
    def first_key(self) -> str:
        """Where a backward's keys begin under documents."""
        return "first_k" if self.varlen else "full * 0"

    @property
    def place_of_keys(self) -> str:
        """What tells the kernel where a sequence's keys are: its first token, or its number."""
        return "first_k" if self.varlen else "batch"

    @property
    def tile_of_queries(self) -> str:
        """The number of a kernel's tile among all, by which its range of keys is found."""
        if self.varlen:
            return "start // BLOCK_M"
        return "batch * tl.cdiv(seqlen_q, BLOCK_M) + start_m // BLOCK_M"

    @property
    def mask_rule(self) -> str:
        """The custom mask as Triton has it."""
        return in_triton(str(self.mask))

    @property
    def merges(self) -> bool:
        """Whether the program that ends last merges partial results, and no kernel after it."""
        return self.family == "decode_last"

    @property
    def single_pass(self) -> bool:
        """Whether the kernel of dk and dv adds up dq too, instead of another after it."""
        return self.family in ("backward_single", "backward_hopper_single")

    @property
    def name(self) -> str:
        """The golden's name: the family, then every switch that is on."""
        return "_".join([self.family, *self.switches])

    @property
    def switches(self) -> tuple[str, ...]:
        """As a problem has them: those that are on, and the custom mask by its digest."""
        on = tuple(switch for switch in SWITCHES if getattr(self, switch))
        return (*on, f"mask_{rule_digest(str(self.mask))}") if self.mask else on


SWITCHES = tuple(field.name for field in fields(Variant) if field.type is bool)

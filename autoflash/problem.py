"""Variant: the structural switches that decide a kernel's text; and a problem told in a line."""

from dataclasses import dataclass, fields

from autoflash.runtime.problem import MODIFIERS, PAGES, Problem, ProblemError

__all__ = ["Problem", "ProblemError", "Variant", "title"]


@dataclass(frozen=True, order=True)
class Variant:
    """What is rendered: booleans and enums only. Numbers belong to Config and to arguments."""

    family: str
    op: str
    causal: bool = False
    window: bool = False  # causal is a place of its right edge
    softcap: bool = False
    alibi: bool = False
    bias: bool = False
    sinks: bool = False
    modified: bool = (
        False  # of decode: what of the above is on is told by arguments that may be None
    )
    varlen: bool = False  # sequences packed one after the other
    paged: bool = False
    queries: bool = False  # several query tokens a sequence
    quantised: bool = False
    token_scales: bool = False

    @property
    def head_scales(self) -> bool:
        """Whether a scale is for a KV head, or for all of them: for more than one token."""
        return self.quantised and not self.token_scales

    @property
    def modifiers(self) -> tuple[str, ...]:
        """What its kernels take beside the plain one's arguments."""
        return tuple(name for name in ("window", *MODIFIERS) if getattr(self, name))

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
    def caps(self) -> bool:
        """Whether scores may be capped."""
        return self.softcap or self.modified

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than products times a scale."""
        return self.softcap or self.alibi or self.bias

    @property
    def has_boundary(self) -> bool:
        """Whether tiles of keys may be seen in part however the lengths fall."""
        return self.causal or self.window or self.varlen

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
        return tuple(switch for switch in SWITCHES if getattr(self, switch))


SWITCHES = tuple(field.name for field in fields(Variant) if field.type is bool)


def title(problem: Problem) -> str:
    """The problem in one line for people; what is as usual is left out."""
    p = problem
    parts = [f"{p.op} {p.dtype}", f"batch {p.batch}", f"heads {p.num_heads}/{p.num_kv_heads}"]
    parts.append(f"head_dim {p.head_dim}" + f"/{p.head_dim_v}" * (p.head_dim_v != p.head_dim))
    if p.op != "decode":
        parts[0] += " causal" if p.causal else " full"
        parts.append(f"{p.seqlen_q} queries" if p.seqlen_q != p.seqlen_k else "")
        parts.append(f"{p.seqlen_k} keys")
        parts.append(f"window {p.window_left}, {p.window_right}" if p.windowed else "")
        parts += p.modifiers
        parts.append(p.layout if p.layout != "bshd" else "")
        parts.append(p.lengths if p.lengths != "equal" else "")
        parts.append("deterministic" if p.deterministic else "")
    else:
        parts.append(f"{p.seqlen_q} queries" if p.seqlen_q > 1 else "")
        parts.append(f"{p.seqlen_k} keys")
        parts.append(f"pages of {p.page_size}" if p.paged else "contiguous")
        parts.append(f"pages {p.pages}" if p.pages in PAGES[1:] else "")
        parts.append(f"window {p.window_left}" if p.windowed else "")
        parts += p.modifiers
        parts.append(f"{p.kv_dtype} with scales per {p.kv_scales}" if p.quantised else "")
        parts.append(p.kv_layout if p.kv_layout != "nhd" else "")
        parts.append(p.lengths if p.lengths != "equal" else "")
    return ", ".join(filter(None, parts))

"""Cost tables: the costs of the layers of published models on one accelerator, computed from formulas.

A layer is a list of operations. An operation takes the time of its arithmetic or of its memory traffic, whichever is
longer (the roofline of Williams, Waterman and Patterson 2009), at the fraction of peak speed that large kernels reach.
There is one table for each model, so all planners are compared on the same costs, and no runtime affects the
comparison. The devices are an A100 with 80 GB (NVIDIA's data sheet: 312 TFLOP/s for bf16 products, 19.5 TFLOP/s for
other arithmetic, 2.04 TB/s) and an H100 SXM (989 TFLOP/s, 67 TFLOP/s, 3.35 TB/s). Kernels are assumed to reach 60 % of
the first two rates and 80 % of the third. Activations and weights take two bytes per element. `TABLES` is for the A100.

For a product with a weight, the gradient of the input and the gradient of the weight each take as long as the forward.
Attention without stored scores (Dao et al. 2022) costs 2.5 times its forward for its input gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import networkx as nx

__all__ = ["A100", "H100", "TABLES", "WIDE", "Device", "Layer", "Work", "table"]

WIDE = 2  # bytes of an element


@dataclass(frozen=True)
class Work:
    """The cost of operations for one micro-batch: seconds, parameters, bytes saved for the backward, and operations.

    ``flops`` are those of products and attention in a forward and a backward. The last five fields are the parts of the
    first five that the GPUs of a tensor group divide.
    """

    forward_s: float = 0
    input_grad_s: float = 0
    weight_grad_s: float = 0
    parameters: int = 0
    saved_bytes: int = 0
    flops: float = 0
    split_forward_s: float = 0
    split_input_grad_s: float = 0
    split_weight_grad_s: float = 0
    split_parameters: int = 0
    split_saved_bytes: int = 0

    def divided(self, *, whole_input: bool = False) -> "Work":
        """Return the work with all of it divided, but each GPU saves the whole input with ``whole_input``."""
        return replace(
            self,
            split_forward_s=self.forward_s,
            split_input_grad_s=self.input_grad_s,
            split_weight_grad_s=self.weight_grad_s,
            split_parameters=self.parameters,
            split_saved_bytes=0 if whole_input else self.saved_bytes,
        )

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator: the rates that its kernels reach, and the costs of operations on it."""

    peak_per_s: float  # of bf16 products
    products_per_s: float
    others_per_s: float
    bytes_per_s: float

    def product(self, rows: int, inner: int, outer: int, experts: int = 1) -> Work:
        """Return the cost of multiplying rows by a weight matrix; each row by the matrix of one of the experts."""
        moved = (rows * inner + experts * inner * outer + rows * outer) * WIDE
        seconds = max(2 * rows * inner * outer / self.products_per_s, moved / self.bytes_per_s)
        flops = 6 * rows * inner * outer
        return Work(seconds, seconds, seconds, experts * inner * outer, rows * inner * WIDE, flops)

    def attention(self, rows: int, context: int, heads: int, head_dim: int, *, causal: bool = True) -> Work:
        """Return the cost of attention: for each row, queries x keys, then scores x values, over ``context`` keys."""
        flops = 4 * rows * context * heads * head_dim * (0.5 if causal else 1)
        seconds = flops / self.products_per_s
        return Work(seconds, 2.5 * seconds, 0, 0, 2 * rows * heads * head_dim * WIDE, 3 * flops)

    def passes(self, elements: int, count: float, width: int = WIDE) -> Work:
        """Return the cost of elementwise operations that read or write ``elements`` numbers ``count`` times."""
        seconds = elements * count * width / self.bytes_per_s
        return Work(seconds, 1.5 * seconds, 0, 0, elements * width)

    def self_attention(
        self, rows: int, sequence: int, width: int, heads: int, head_dim: int, keys: int, *, causal: bool
    ) -> Work:
        """Return the cost of a norm, projections, attention and residual sum; ``keys``: number of key-value heads."""
        return (
            self.passes(rows * width, 4)
            + self.product(rows, width, (heads + 2 * keys) * head_dim).divided(whole_input=True)
            + self.attention(rows, sequence, heads, head_dim, causal=causal).divided()
            + self.product(rows, heads * head_dim, width).divided()
        )

    def feed_forward(
        self, rows: int, width: int, hidden: int, *, gated: bool, experts: int = 1, chosen: int = 1
    ) -> Work:
        """Return the cost of two products (three if gated) and an activation; a row uses ``chosen`` of the experts."""
        sent = rows * chosen
        return (
            self.passes(rows * width, 4 if experts == 1 else 4 + 4 * chosen)  # rows are sent to the experts and back
            + self.product(sent, width, hidden * (2 if gated else 1), experts).divided(whole_input=True)
            + self.passes(sent * hidden, 3 if gated else 2).divided()
            + self.product(sent, hidden, width, experts).divided()
        )

    def embedding(self, rows: int, width: int, vocabulary: int) -> Work:
        """Return the cost of one table lookup for each row; the backward adds gradients to the table."""
        seconds = 2 * rows * width * WIDE / self.bytes_per_s
        size = vocabulary * width
        return Work(seconds, 0, 2 * seconds, size, rows * 8, split_parameters=size)

    def head(self, rows: int, width: int, vocabulary: int) -> Work:
        """Return the cost of a norm, the logits, and their cross-entropy in float32."""
        logits = self.product(rows, width, vocabulary).divided(whole_input=True)
        return self.passes(rows * width, 3) + logits + self.passes(rows * vocabulary, 2, 4).divided()

    def convolution(self, images: int, side: int, given: int, made: int, kernel: int) -> Work:
        """Return the cost of a convolution with output ``side`` x ``side``, its batch norm and its activation."""
        rows, inner = images * side**2, given * kernel**2
        moved = (rows * (given + made) + inner * made) * WIDE
        seconds = max(2 * rows * inner * made / self.products_per_s, moved / self.bytes_per_s)
        work = Work(seconds, seconds, seconds, inner * made, rows * given * WIDE, 6 * rows * inner * made)
        return work + self.passes(rows * made, 5)


A100 = Device(peak_per_s=312e12, products_per_s=0.6 * 312e12, others_per_s=0.6 * 19.5e12, bytes_per_s=0.8 * 2.04e12)
H100 = Device(peak_per_s=989e12, products_per_s=0.6 * 989e12, others_per_s=0.6 * 67e12, bytes_per_s=0.8 * 3.35e12)

# The models of `TABLES` run on an A100.
product, attention, passes, convolution = A100.product, A100.attention, A100.passes, A100.convolution
self_attention, feed_forward, embedding, head = A100.self_attention, A100.feed_forward, A100.embedding, A100.head

# ---- models, their layers in order ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer: its work, the bytes of its output, and the layers that use the output (default: the next layer)."""

    name: str
    work: Work
    gives: int
    users: tuple[str, ...] = ()


Layers = Iterator[Layer]


def gemma_2_9b(rows: int = 4096) -> Layers:
    """A GPT with a large vocabulary: Gemma 2 9B (Gemma Team 2024, table 1), one sequence of 4,096 tokens.

    Every second layer attends to the last 4,096 tokens only, which here is the whole sequence.
    """
    width, given = 3584, rows * 3584 * WIDE
    yield Layer("embedding", embedding(rows, width, 256_128), given)
    block = self_attention(rows, rows, width, 16, 256, 8, causal=True) + feed_forward(rows, width, 14336, gated=True)
    for layer in range(42):
        yield Layer(f"layers.{layer}", block, given)
    yield Layer("head", head(rows, width, 256_128), 4)


def glam_8b_64e(sequences: int = 4) -> Layers:
    """A mixture of experts: GLaM 8B/64E (Du et al. 2022, table 4), sequences of 1,024 tokens.

    Every second layer has 64 experts, two of which serve a token. If each expert has two weight matrices (no gate),
    the parameters add up to the published 143 B.
    """
    rows, width, vocabulary = 1024 * sequences, 4096, 256_000
    given = rows * width * WIDE
    heads = self_attention(rows, 1024, width, 32, 128, 32, causal=True)
    yield Layer("embedding", embedding(rows, width, vocabulary), given)
    for layer in range(32):
        experts: dict[str, int] = {"experts": 64, "chosen": 2} if layer % 2 else {}
        yield Layer(f"layers.{layer}", heads + feed_forward(rows, width, 16384, gated=False, **experts), given)
    yield Layer("head", head(rows, width, vocabulary), 4)


def jamba(rows: int = 4096) -> Layers:
    """Attention and state spaces: Jamba v0.1 (Lieber et al. 2024, and its published configuration).

    One layer in 8 has attention. One layer in 2 has 16 experts, two of which serve a token.
    """
    width, given = 4096, rows * 4096 * WIDE
    yield Layer("embedding", embedding(rows, width, 65536), given)
    for layer in range(32):
        heads = layer % 8 == 4
        mixer = self_attention(rows, rows, width, 32, 128, 8, causal=True) if heads else mamba(rows, width)
        experts = {"experts": 16, "chosen": 2} if layer % 2 else {}
        yield Layer(f"layers.{layer}", mixer + feed_forward(rows, width, 14336, gated=True, **experts), given)
    yield Layer("head", head(rows, width, 65536), 4)


def mamba(rows: int, width: int, state: int = 16, rank: int = 256) -> Work:
    """Return the cost of a selective state space layer (Gu and Dao 2023): projections, a short convolution, the scan.

    The scan takes nine operations for each channel and state in the forward, and 27 in the backward, which
    recomputes part of the forward.
    """
    inner = 2 * width
    scan_s = max(9 * rows * inner * state / A100.others_per_s, 5 * rows * inner * WIDE / A100.bytes_per_s)
    return (
        passes(rows * width, 4)
        + product(rows, width, 2 * inner)
        + passes(rows * inner, 4)  # the convolution of four taps, and its activation
        + product(rows, inner, rank + 2 * state)
        + product(rows, rank, inner)
        + Work(scan_s, 3 * scan_s, 0, inner * state, 4 * rows * inner * WIDE)
        + product(rows, inner, width)
    )


def resnet_152(images: int = 32) -> Layers:
    """A convolutional network: ResNet-152 (He et al. 2016, table 1), 32 images of 224 x 224."""
    stem = convolution(images, 112, 3, 64, 7) + passes(images * 112**2 * 64, 2)
    yield Layer("stem", stem, images * 56**2 * 64 * WIDE)
    given = 64
    for part, (blocks, width, side) in enumerate(((3, 64, 56), (8, 128, 28), (36, 256, 14), (3, 512, 7))):
        for block in range(blocks):
            first = side * 2 if part and not block else side  # the stride is in the second convolution
            work = convolution(images, first, given, width, 1) + convolution(images, side, width, width, 3)
            work += convolution(images, side, width, 4 * width, 1) + passes(images * side**2 * 4 * width, 3)
            if not block:
                work += convolution(images, side, given, 4 * width, 1)
            given = 4 * width
            yield Layer(f"layer{part + 1}.{block}", work, images * side**2 * given * WIDE)
    yield Layer("head", passes(images * 49 * given, 1) + product(images, given, 1000), 4)


def t5_3b(sequences: int = 8) -> Layers:
    """T5-3B (Raffel et al. 2020): 512 input tokens and 114 output tokens, as in its span-corruption training."""
    width, hidden, heads, head_dim, vocabulary = 1024, 16384, 32, 128, 32128
    read, written = 512 * sequences, 114 * sequences
    inner = heads * head_dim
    encoder = self_attention(read, 512, width, heads, head_dim, heads, causal=False)
    encoder += feed_forward(read, width, hidden, gated=False)
    decoder = self_attention(written, 114, width, heads, head_dim, heads, causal=True)
    decoder += passes(written * width, 4) + product(written, width, inner) + product(read, width, 2 * inner)
    decoder += attention(written, 512, heads, head_dim, causal=False) + product(written, inner, width)
    decoder += feed_forward(written, width, hidden, gated=False)
    yield Layer("encoder.embedding", embedding(read, width, vocabulary), read * width * WIDE)
    for layer in range(23):
        yield Layer(f"encoder.{layer}", encoder, read * width * WIDE)
    yield Layer("encoder.23", encoder, read * width * WIDE, tuple(f"decoder.{layer}" for layer in range(24)))
    yield Layer("decoder.embedding", embedding(written, width, vocabulary), written * width * WIDE)
    for layer in range(24):
        yield Layer(f"decoder.{layer}", decoder, written * width * WIDE)
    yield Layer("head", head(written, width, vocabulary), 4)


def nemotron_h_8b(rows: int = 8192) -> Layers:
    """Attention and state spaces: Nemotron-H 8B (NVIDIA 2025, and its published configuration), 8,192 tokens.

    A layer is a Mamba-2 layer (M), a feed-forward layer with a squared ReLU (-), or attention (*).
    """
    width, vocabulary = 4096, 131_072
    given = rows * width * WIDE
    works = {
        "M": mamba_2(rows, width),
        "-": feed_forward(rows, width, 21504, gated=False),
        "*": self_attention(rows, rows, width, 32, 128, 8, causal=True),
    }
    yield Layer("embedding", embedding(rows, width, vocabulary), given)
    for layer, kind in enumerate("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"):
        yield Layer(f"layers.{layer}", works[kind], given)
    yield Layer("head", head(rows, width, vocabulary), 4)


def mamba_2(rows: int, width: int, heads: int = 128, head_dim: int = 64, state: int = 128, groups: int = 8) -> Work:
    """Return the cost of a Mamba-2 layer (Dao and Gu 2024): projections, a convolution, the scan in 128-token chunks.

    Inside a chunk, the scan costs as much as attention. Each chunk passes its states to the next. The backward does
    twice the work.
    """
    inner, mixed, chunk = heads * head_dim, groups * state, 128
    scan_s = rows * (2 * chunk * (mixed + inner) + 4 * state * inner) / A100.products_per_s
    return (
        passes(rows * width, 4)
        + product(rows, width, 2 * inner + 2 * mixed + heads)
        + passes(rows * (inner + 2 * mixed), 4)  # the convolution of four taps, and its activation
        + Work(scan_s, 2 * scan_s, 0, 0, 2 * rows * inner * WIDE)
        + passes(rows * inner, 3)  # the gate and its norm
        + product(rows, inner, width)
    )


def deepseek_v3(rows: int = 4096) -> Layers:
    """A mixture of experts with latent attention: DeepSeek-V3 (DeepSeek-AI 2024, section 4.2), 4,096 tokens.

    The first three layers are dense. The others have 256 experts, eight of which serve a token, and one expert that
    serves every token. The layer that predicts a second token is left out.
    """
    width, heads, vocabulary = 7168, 128, 129_280
    given = rows * width * WIDE
    latent = (
        passes(rows * width, 4)
        + product(rows, width, 1536)  # queries are compressed to 1,536 elements,
        + product(rows, 1536, heads * (128 + 64))
        + product(rows, width, 512 + 64)  # and keys with values to 512
        + product(rows, 512, heads * (128 + 128))
        + attention(rows, rows, heads, 160)  # the mean of keys (192) and values (128)
        + product(rows, heads * 128, width)
    )
    dense = latent + feed_forward(rows, width, 18432, gated=True)
    mixture = latent + feed_forward(rows, width, 2048, gated=True, experts=256, chosen=8)
    mixture += feed_forward(rows, width, 2048, gated=True)
    yield Layer("embedding", embedding(rows, width, vocabulary), given)
    for layer in range(61):
        yield Layer(f"layers.{layer}", dense if layer < 3 else mixture, given)
    yield Layer("head", head(rows, width, vocabulary), 4)


def gemma_3_27b(rows: int = 4096) -> Layers:
    """A GPT with local attention and a large vocabulary: Gemma 3 27B (Gemma Team 2025), one sequence of 4,096 tokens.

    Five of six layers attend to the last 1,024 tokens only.
    """
    width, given, vocabulary, window = 5376, rows * 5376 * WIDE, 262_144, 1024
    context = window - window**2 // (2 * rows)  # a token's mean number of keys: the first tokens have fewer
    local = self_attention(rows, context, width, 32, 128, 16, causal=False)
    everywhere = self_attention(rows, rows, width, 32, 128, 16, causal=True)
    dense = feed_forward(rows, width, 21504, gated=True)
    yield Layer("embedding", embedding(rows, width, vocabulary), given)
    for layer in range(62):
        yield Layer(f"layers.{layer}", dense + (everywhere if layer % 6 == 5 else local), given)
    yield Layer("head", head(rows, width, vocabulary), 4)


def table(layers: Iterable[Layer]) -> "nx.DiGraph[str]":
    """Return the layers as a graph with costs, in the form that `pipesched.graph_of` returns."""
    graph: nx.DiGraph[str] = nx.DiGraph(parameters={})
    row, given = list(layers), 0
    for layer in row:
        work, weights = layer.work, layer.work.parameters * WIDE
        graph.graph["parameters"][f"{layer.name}.weight"] = work.parameters, weights
        graph.add_node(
            layer.name,
            forward_s=work.forward_s,
            backward_s=work.input_grad_s + work.weight_grad_s,
            input_grad_s=work.input_grad_s,
            weight_grad_s=work.weight_grad_s,
            input_bytes=given,
            output_bytes=layer.gives,
            activation_bytes=work.saved_bytes,
            weight_grad_bytes=work.saved_bytes,
            parameter_bytes=weights,
            gradient_bytes=weights,
            num_parameters=work.parameters,
            parameters=(f"{layer.name}.weight",),
        )
        given = layer.gives
    for layer, following in pairwise(row):
        graph.add_edge(layer.name, following.name, tensors={})
        for user in layer.users or (following.name,):
            graph.add_edge(layer.name, user, tensors={layer.name: layer.gives})
    return graph


TABLES: Mapping[str, Callable[[], Layers]] = {
    "GPT, large vocabulary (Gemma 2 9B)": gemma_2_9b,
    "mixture of experts (GLaM 8B/64E)": glam_8b_64e,
    "attention and state spaces (Jamba)": jamba,
    "convolution net (ResNet-152)": resnet_152,
    "T5-3B": t5_3b,
    "attention, states (Nemotron-H 8B)": nemotron_h_8b,
    "mixture of experts (DeepSeek-V3)": deepseek_v3,
    "GPT, local attention (Gemma 3 27B)": gemma_3_27b,
}

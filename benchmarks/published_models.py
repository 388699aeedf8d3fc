"""Published models: the shapes of six models from their papers, and tables of their layers for `Profile.from_table`.

`tables` yields the files in benchmarks/published: two for each model, for an A100 and for an H100. The times follow
from the formulas of `cost_tables`; nothing is measured. If a paper splits the layers of a model over the GPUs of a host
(tensor parallelism), then a row of the table is a layer on a group of 8 GPUs: the group shares the work, and the times
contain the all-reduces inside the group: two in a forward, and two in a backward (Narayanan et al. 2021, section 2.3).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cost_tables import A100, H100, WIDE, Device, Work

from pipesched import Link, Links

__all__ = ["FOLDER", "HOST", "HOSTS", "MODELS", "Host", "PublishedModel", "tables"]

FOLDER = Path(__file__).parent / "published"
HOST = 8  # GPUs
STATE_BYTES = 12  # float32 weight and Adam's two states
UPDATE_BYTES = 2 * WIDE + 2 * STATE_BYTES + 2  # weight, gradient and states, read or written
COLUMNS = (
    *("rows", "name", "inputs", "tied_to", "forward_ms", "backward_ms", "weight_grad_ms", "update_ms"),
    *("parameter_bytes", "output_bytes", "activation_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A kind of host with 8 GPUs, and its links (NVIDIA's data sheets)."""

    gpu: str
    device: Device
    #: NVLink: 5/6 of the bandwidth of one direction.
    inside: Link
    #: InfiniBand: the network card of each GPU.
    between: Link


HOSTS = {
    "a100": Host(gpu="A100", device=A100, inside=Link(5e-6, 250e9), between=Link(10e-6, 25e9)),
    "h100": Host(gpu="H100", device=H100, inside=Link(5e-6, 375e9), between=Link(10e-6, 50e9)),
}


@dataclass(frozen=True, kw_only=True)
class TableLayer:
    """A layer of a table: its work, the size of its output, and the layers whose outputs or weights it uses."""

    name: str
    work: Work
    output_bytes: int
    #: Default: the previous layer. "-": none.
    inputs: str = ""
    tied_to: str = ""


TableLayers = Iterator[TableLayer]


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model: its shape as a function that lists the layers, and the batch of a training step."""

    title: str
    #: The sources of the shape and of the batch, and the assumptions.
    source: tuple[str, ...]
    #: The published number of parameters.
    num_parameters: float
    #: A function (device, rows of a micro-batch) -> layers.
    layers: Callable[[Device, int], TableLayers]
    #: The unit of a batch, such as "sequence".
    row: str
    #: The numbers of rows in a micro-batch, and in a batch.
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    batch: int
    #: The number of GPUs that split each layer.
    group: int = 1
    #: The size of the tensor that an all-reduce inside the group sums, for each row.
    summed_bytes: int = 0

    def flops(self, host: Host) -> float:
        """Return the operations of a step: those of products and attention, without recomputation."""
        size = self.sizes[-1]
        return sum(layer.work.flops for layer in self.layers(host.device, size)) * self.batch / size

    def links(self, host: Host, num_ranks: int) -> Links:
        """Return the links between the ranks. All network cards of a group serve its messages."""
        between = replace(host.between, bytes_per_s=self.group * (host.between.bytes_per_s or 0))
        return Links.of_hosts(HOST // self.group, num_ranks, inside=host.inside, between=between)

    def lines(self, host: Host) -> Iterator[str]:
        """Yield the lines of the model's table: comments, the names of the columns, and the layers."""
        ranks = f"a group of {self.group} GPUs ({host.gpu}, 80 GB)" if self.group > 1 else f"an {host.gpu} with 80 GB"
        yield f"# {self.title}"
        yield from (f"# {line}" for line in self.source)
        yield f"# A rank is {ranks}. rows: the {self.row} of a micro-batch."
        if self.group > 1:
            yield "# The group splits each layer; times contain two all-reduces in a forward, and two in a backward."
        yield "# Times are computed, not measured: the longer of arithmetic and memory traffic of each operation, at"
        yield "# 60 % of the peak of bf16 products and 80 % of the memory bandwidth (benchmarks/cost_tables.py)."
        yield "# Elements have two bytes. activation_bytes: attention stores no scores (Dao et al. 2022)."
        yield f"# update_ms: {UPDATE_BYTES} bytes a parameter, read or written."
        yield "# Written by benchmarks/published.py --write."
        yield ",".join(COLUMNS)
        for size in self.sizes:
            reduce_s = self._all_reduce_s(host, size)
            for layer in self.layers(host.device, size):
                yield ",".join(map(str, self._cells(size, layer, host, reduce_s)))

    def _cells(self, size: int, layer: TableLayer, host: Host, reduce_s: float) -> Iterable[str | int]:
        """Return the cells of a layer's line. ``reduce_s`` is the time of an all-reduce inside the group."""
        work = layer.work
        reduces_s = 2 * reduce_s * layer.name.startswith("layers.")
        backward_s = (work.input_grad_s + work.weight_grad_s) / self.group + reduces_s
        update_s = 0 if layer.tied_to else UPDATE_BYTES * work.parameters / host.device.bytes_per_s / self.group
        times = work.forward_s / self.group + reduces_s, backward_s, work.weight_grad_s / self.group, update_s
        sizes = work.parameters * WIDE, layer.output_bytes, work.saved_bytes
        return size, layer.name, layer.inputs, layer.tied_to, *(f"{seconds * 1e3:.6g}" for seconds in times), *sizes

    def _all_reduce_s(self, host: Host, size: int) -> float:
        ring = range(self.group)
        return Links(inside=host.inside).all_reduce_s(size * self.summed_bytes, ring) if self.group > 1 else 0.0


def language_model(embedding: Work, blocks: Sequence[Work], head: TableLayer, given: int) -> TableLayers:
    """An embedding, blocks whose outputs have ``given`` bytes, and a head."""
    yield TableLayer(name="embedding", work=embedding, output_bytes=given)
    for layer, block in enumerate(blocks):
        yield TableLayer(name=f"layers.{layer}", work=block, output_bytes=given)
    yield head


def gpt_3_175b(device: Device, sequences: int) -> TableLayers:
    """96 layers of width 12,288; the head shares the weights of the embedding."""
    rows, width, vocabulary = 2048 * sequences, 12288, 51_200
    given = rows * width * WIDE
    block = device.self_attention(rows, 2048, width, 96, 128, 96, causal=True)
    block += device.feed_forward(rows, width, 4 * width, gated=False)
    embedding = device.embedding(rows, width, vocabulary)
    positions = 2048 * width
    first = replace(embedding, parameters=embedding.parameters + positions)
    head = TableLayer(name="head", work=device.head(rows, width, vocabulary), output_bytes=4, tied_to="embedding")
    yield from language_model(first, [block] * 96, head, given)


def llama_3_70b(device: Device, sequences: int) -> TableLayers:
    """80 layers of width 8,192 with 8 key-value heads, and gated feed-forward layers."""
    rows, width, vocabulary = 8192 * sequences, 8192, 128_256
    given = rows * width * WIDE
    block = device.self_attention(rows, 8192, width, 64, 128, 8, causal=True)
    block += device.feed_forward(rows, width, 28_672, gated=True)
    head = TableLayer(name="head", work=device.head(rows, width, vocabulary), output_bytes=4)
    yield from language_model(device.embedding(rows, width, vocabulary), [block] * 80, head, given)


def mixtral_8x7b(device: Device, sequences: int) -> TableLayers:
    """32 layers of width 4,096 with 8 experts. Each token goes through two of the experts."""
    tokens, width, vocabulary = 32_768, 4096, 32_000
    rows = tokens * sequences
    given = rows * width * WIDE
    block = device.self_attention(rows, tokens, width, 32, 128, 8, causal=True)
    block += device.feed_forward(rows, width, 14_336, gated=True, experts=8, chosen=2)
    block += device.product(rows, width, 8)  # the router
    head = TableLayer(name="head", work=device.head(rows, width, vocabulary), output_bytes=4)
    yield from language_model(device.embedding(rows, width, vocabulary), [block] * 32, head, given)


def vit_22b(device: Device, images: int) -> TableLayers:
    """48 layers of width 6,144; an image of 224 x 224 has 256 patches of 14 x 14."""
    patches, width, classes = 256, 6144, 30_000
    rows = patches * images
    given = rows * width * WIDE
    block = device.self_attention(rows, patches, width, 48, 128, 48, causal=False)
    block += device.feed_forward(rows, width, 24_576, gated=False)
    first = device.product(rows, 3 * 14**2, width)
    positions = patches * width
    yield TableLayer(name="patches", work=replace(first, parameters=first.parameters + positions), output_bytes=given)
    for layer in range(48):
        yield TableLayer(name=f"layers.{layer}", work=block, output_bytes=given)
    head = device.passes(rows * width, 1) + device.head(images, width, classes)
    yield TableLayer(name="head", work=head, output_bytes=4)


def t5_11b(device: Device, sequences: int) -> TableLayers:
    """An encoder and a decoder of 24 layers; both embeddings and the head share their weights.

    A sequence has 512 input tokens and, after span corruption, 114 output tokens.
    """
    width, hidden, heads, vocabulary = 1024, 65_536, 128, 32_128
    read, written = 512 * sequences, 114 * sequences
    inner = heads * 128
    encoder = device.self_attention(read, 512, width, heads, 128, heads, causal=False)
    encoder += device.feed_forward(read, width, hidden, gated=False)
    decoder = device.self_attention(written, 114, width, heads, 128, heads, causal=True)
    decoder += device.passes(written * width, 4) + device.product(written, width, inner)
    decoder += device.product(read, width, 2 * inner)  # keys and values of the encoder's output
    decoder += device.attention(written, 512, heads, 128, causal=False) + device.product(written, inner, width)
    decoder += device.feed_forward(written, width, hidden, gated=False)
    first, tied = "encoder.embedding", {"tied_to": "encoder.embedding"}
    seen, made = read * width * WIDE, written * width * WIDE
    yield TableLayer(name=first, work=device.embedding(read, width, vocabulary), output_bytes=seen)
    for layer in range(24):
        yield TableLayer(name=f"encoder.{layer}", work=encoder, output_bytes=seen)
    second = device.embedding(written, width, vocabulary)
    yield TableLayer(name="decoder.embedding", work=second, output_bytes=made, inputs="-", **tied)
    before = "decoder.embedding"
    for layer in range(24):
        name = f"decoder.{layer}"
        yield TableLayer(name=name, work=decoder, output_bytes=made, inputs=f"{before}|encoder.23")
        before = name
    yield TableLayer(name="head", work=device.head(written, width, vocabulary), output_bytes=4, **tied)


def sdxl(device: Device, images: int) -> TableLayers:
    """A U-net with three levels, for images of 512 x 512, whose latents have 64 x 64 elements."""
    yield from UNet(device, images).layers()


class UNet:
    """Lists the layers of SDXL's U-net, which sends the output of each layer on the way down to one on the way up.

    Args:
        device: the accelerator.
        images: the images of a micro-batch.

    """

    WIDTHS = 320, 640, 1280
    BLOCKS = 0, 2, 10
    SIDE = 64
    TIMES = 1280  # the width of the embedding of time and conditions

    def __init__(self, device: Device, images: int) -> None:
        self._device = device
        self._images = images
        self._skips: list[tuple[str, int]] = []
        self._last = ""

    def layers(self) -> TableLayers:
        """Yield all layers, in execution order."""
        widths, blocks, side = self.WIDTHS, self.BLOCKS, self.SIDE
        yield self._times()
        width = widths[0]
        yield self._convolution("conv_in", side, 4, width, inputs="-")
        self._skips.append((self._last, width))
        for level in range(3):
            for number in range(2):
                yield from self._block(f"down.{level}.{number}", side, width, widths[level], blocks[level])
                width = widths[level]
                self._skips.append((self._last, width))
            if level < 2:
                side //= 2
                yield self._convolution(f"down.{level}.halved", side, width, width)
                self._skips.append((self._last, width))
        yield from self._block("middle.0", side, width, width, blocks[-1])
        yield from self._block("middle.1", side, width, width, 0)
        for level in reversed(range(3)):
            for number in range(3):
                skip, more = self._skips.pop()
                name = f"up.{level}.{number}"
                yield from self._block(name, side, width + more, widths[level], blocks[level], skip)
                width = widths[level]
            if level:
                side *= 2
                yield self._convolution(f"up.{level}.doubled", side, width, width)
        yield self._convolution("conv_out", side, width, 4)

    def _times(self) -> TableLayer:
        """Return the embedding of the time step, of the image sizes and of the pooled text."""
        product = self._device.product
        work = product(self._images, self.WIDTHS[0], self.TIMES) + product(self._images, 2816, self.TIMES)
        work += product(self._images, self.TIMES, self.TIMES) + product(self._images, self.TIMES, self.TIMES)
        return TableLayer(name="times", work=work, output_bytes=self._images * self.TIMES * WIDE)

    def _convolution(self, name: str, side: int, given: int, made: int, inputs: str = "") -> TableLayer:
        self._last = name
        work = self._device.convolution(self._images, side, given, made, 3)
        return TableLayer(name=name, work=work, output_bytes=self._images * side**2 * made * WIDE, inputs=inputs)

    def _block(self, name: str, side: int, given: int, made: int, blocks: int, skip: str = "") -> TableLayers:
        """Yield a residual layer with two convolutions, and the transformer blocks that follow it."""
        work = self._device.convolution(self._images, side, given, made, 3)
        work += self._device.convolution(self._images, side, made, made, 3)
        work += self._device.product(self._images, self.TIMES, made)
        if given != made:
            work += self._device.convolution(self._images, side, given, made, 1)
        size = self._images * side**2 * made * WIDE
        residual = f"{name}.residual"
        inputs = "|".join(filter(None, (self._last, skip, "times")))
        yield TableLayer(name=residual, work=work, output_bytes=size, inputs=inputs)
        self._last = residual
        for number in range(blocks):
            work = self._transformer(side**2, made)
            if number in (0, blocks - 1):  # a product before the first block and after the last
                work += self._device.product(self._images * side**2, made, made)
            inputs = f"{self._last}|{residual}" if number == blocks - 1 and blocks > 1 else ""
            self._last = f"{name}.{number}"
            yield TableLayer(name=self._last, work=work, output_bytes=size, inputs=inputs)

    def _transformer(self, tokens: int, width: int) -> Work:
        """Return the work of a block: attention in the image, attention to 77 tokens of text, and a feed-forward."""
        rows, heads = self._images * tokens, width // 64
        work = self._device.self_attention(rows, tokens, width, heads, 64, heads, causal=False)
        work += self._device.passes(rows * width, 4) + self._device.product(rows, width, width)
        work += self._device.product(77 * self._images, 2048, 2 * width)
        work += self._device.attention(rows, 77, heads, 64, causal=False) + self._device.product(rows, width, width)
        return work + self._device.feed_forward(rows, width, 4 * width, gated=True)


MODELS = {
    "gpt-3-175b": PublishedModel(
        title="GPT-3 175B: 96 layers of width 12288 with 96 heads, sequences of 2048 tokens",
        source=(
            "Source: Brown et al. 2020 (arXiv:2005.14165), table 2.1. The vocabulary of 51200 and the batch of 1536",
            "sequences are those of Narayanan et al. 2021 (arXiv:2104.04473), section 5 and table 2.",
        ),
        num_parameters=174.6e9,
        layers=gpt_3_175b,
        row="sequences",
        batch=1536,
        group=8,
        summed_bytes=2048 * 12288 * WIDE,
    ),
    "llama-3-70b": PublishedModel(
        title="Llama 3 70B: 80 layers of width 8192 with 64 heads and 8 key-value heads, sequences of 8192 tokens",
        source=(
            "Source: Dubey et al. 2024 (arXiv:2407.21783), table 3; the vocabulary of 128256 is that of the published",
            "configuration. The batch of 16 million tokens (2048 sequences) is that of Llama 3 405B, table 4.",
        ),
        num_parameters=70.6e9,
        layers=llama_3_70b,
        row="sequences",
        sizes=(1, 2, 4),
        batch=2048,
        group=8,
        summed_bytes=8192 * 8192 * WIDE,
    ),
    "mixtral-8x7b": PublishedModel(
        title="Mixtral 8x7B: 32 layers of width 4096 with 8 experts, sequences of 32768 tokens",
        source=(
            "Source: Jiang et al. 2024 (arXiv:2401.04088), table 1. The paper does not report the batch; 512 sequences",
            "are assumed.",
        ),
        num_parameters=46.7e9,
        layers=mixtral_8x7b,
        row="sequences",
        sizes=(1, 2),
        batch=512,
    ),
    "vit-22b": PublishedModel(
        title="ViT-22B: 48 layers of width 6144 with 48 heads, images of 256 patches",
        source=(
            "Source: Dehghani et al. 2023 (arXiv:2302.05442), table 1 and section 4 (batch of 65536 images). The head",
            "is the mean of all patches and a product with 30000 classes. The number of parameters is that of table 1.",
        ),
        num_parameters=21.743e9,
        layers=vit_22b,
        row="images",
        sizes=(8, 16, 32, 64),
        batch=65_536,
    ),
    "t5-11b": PublishedModel(
        title="T5-11B: 24 layers each in encoder and decoder, width 1024, 128 heads, feed-forward width 65536",
        source=(
            "Source: Raffel et al. 2020 (JMLR 21, arXiv:1910.10683), sections 2.1 and 3.7: batch of 2048 sequences of",
            "512 tokens. The vocabulary of 32128 is that of the published checkpoint.",
        ),
        num_parameters=11.3e9,
        layers=t5_11b,
        row="sequences",
        batch=2048,
    ),
    "sdxl-unet": PublishedModel(
        title="U-net of Stable Diffusion XL: widths 320, 640 and 1280, with 0, 2 and 10 transformer blocks",
        source=(
            "Source: Podell et al. 2023 (arXiv:2307.01952), table 1 and section 2.5 (images of 512 x 512, batch of",
            "2048). The other sizes are those of the published configuration.",
        ),
        num_parameters=2.567e9,
        layers=sdxl,
        row="images",
        batch=2048,
    ),
}


def tables() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each table."""
    for name, model in MODELS.items():
        for kind, host in HOSTS.items():
            yield FOLDER / f"{name}-{kind}.csv", "\n".join(model.lines(host)) + "\n"

"""Published models: the shapes of six models from their papers, and tables of their layers for `Profile.from_table`.

`tables` yields the files in benchmarks/published: two for each model, for an A100 and for an H100. The times follow
from the formulas of `cost_tables`; nothing is measured. A rank is a GPU. Each row also says which shares of a layer
the GPUs of a tensor group divide, and what they all-reduce (Narayanan et al. 2021, section 2.3): products and attention
are divided by columns, rows and heads, embeddings and heads by the vocabulary; a block sums the outputs of attention
and of the feed-forward layer in its forward, and the gradients of their inputs in its backward. Convolutions and
patches are not divided.
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
    *("split_forward", "split_backward", "split_weight_grad", "split_parameters", "split_activations"),
    *("all_reduce_forward_bytes", "all_reduce_backward_bytes", "all_reduces_forward", "all_reduces_backward"),
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
    #: The sizes of the tensors that a tensor group sums in a forward, and in a backward.
    forward_sums: tuple[int, ...] = ()
    backward_sums: tuple[int, ...] = ()


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
    #: The numbers of GPUs that can split each layer: those that divide all heads.
    tensor: tuple[int, ...] = (1, 2, 4, 8)

    def flops(self, host: Host) -> float:
        """Return the operations of a step: those of products and attention, without recomputation."""
        size = self.sizes[-1]
        return sum(layer.work.flops for layer in self.layers(host.device, size)) * self.batch / size

    def links(self, host: Host, num_ranks: int) -> Links:
        """Return the links between the ranks. Each GPU has a network card of its own."""
        return Links.of_hosts(HOST, num_ranks, inside=host.inside, between=host.between)

    def lines(self, host: Host) -> Iterator[str]:
        """Yield the lines of the model's table: comments, the names of the columns, and the layers."""
        yield f"# {self.title}"
        yield from (f"# {line}" for line in self.source)
        yield f"# A rank is an {host.gpu} with 80 GB. rows: the {self.row} of a micro-batch."
        yield "# Times are computed, not measured: the longer of arithmetic and memory traffic of each operation, at"
        yield "# 60 % of the peak of bf16 products and 80 % of the memory bandwidth (benchmarks/cost_tables.py)."
        yield "# Elements have two bytes. activation_bytes: attention stores no scores (Dao et al. 2022)."
        yield f"# update_ms: {UPDATE_BYTES} bytes a parameter, read or written."
        yield "# split_*: the shares that the GPUs of a tensor group divide; all_reduce*: what they sum."
        yield "# Written by benchmarks/published.py --write."
        yield ",".join(COLUMNS)
        for size in self.sizes:
            for layer in self.layers(host.device, size):
                yield ",".join(map(str, self._cells(size, layer, host)))

    def _cells(self, size: int, layer: TableLayer, host: Host) -> Iterable[str | int]:
        """Return the cells of a layer's line."""
        work = layer.work
        backward_s = work.input_grad_s + work.weight_grad_s
        update_s = 0 if layer.tied_to else UPDATE_BYTES * work.parameters / host.device.bytes_per_s
        times = work.forward_s, backward_s, work.weight_grad_s, update_s
        sizes = work.parameters * WIDE, layer.output_bytes, work.saved_bytes
        shares = (
            _share(work.split_forward_s, work.forward_s),
            _share(work.split_input_grad_s + work.split_weight_grad_s, backward_s),
            _share(work.split_weight_grad_s, work.weight_grad_s),
            _share(work.split_parameters, work.parameters),
            _share(work.split_saved_bytes, work.saved_bytes),
        )
        sums = (layer.forward_sums, layer.backward_sums)
        exchanged = *map(sum, sums), *map(len, sums)
        seconds = (f"{each * 1e3:.6g}" for each in times)
        return size, layer.name, layer.inputs, layer.tied_to, *seconds, *sizes, *shares, *exchanged


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:.6g}"


def block_of(name: str, work: Work, output_bytes: int, inputs: str = "") -> TableLayer:
    """Return a block with attention and a feed-forward layer, whose outputs and gradients a tensor group sums."""
    sums = (output_bytes, output_bytes)
    return TableLayer(
        name=name, work=work, output_bytes=output_bytes, inputs=inputs, forward_sums=sums, backward_sums=sums
    )


def head_of(device: Device, rows: int, width: int, vocabulary: int, tied_to: str = "") -> TableLayer:
    """Return the head and its loss: a tensor group sums three numbers of a row, and the gradients of the input.

    The three numbers are the largest logit, the sum of exponentials and the logit of the label.
    """
    return TableLayer(
        name="head",
        work=device.head(rows, width, vocabulary),
        output_bytes=4,
        tied_to=tied_to,
        forward_sums=(4 * rows,) * 3,
        backward_sums=(rows * width * WIDE,),
    )


def language_model(embedding: Work, blocks: Sequence[Work], head: TableLayer, given: int) -> TableLayers:
    """An embedding, blocks whose outputs have ``given`` bytes, and a head."""
    yield TableLayer(name="embedding", work=embedding, output_bytes=given, forward_sums=(given,))
    for layer, block in enumerate(blocks):
        yield block_of(f"layers.{layer}", block, given)
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
    head = head_of(device, rows, width, vocabulary, tied_to="embedding")
    yield from language_model(first, [block] * 96, head, given)


def llama_3_70b(device: Device, sequences: int) -> TableLayers:
    """80 layers of width 8,192 with 8 key-value heads, and gated feed-forward layers."""
    rows, width, vocabulary = 8192 * sequences, 8192, 128_256
    given = rows * width * WIDE
    block = device.self_attention(rows, 8192, width, 64, 128, 8, causal=True)
    block += device.feed_forward(rows, width, 28_672, gated=True)
    head = head_of(device, rows, width, vocabulary)
    yield from language_model(device.embedding(rows, width, vocabulary), [block] * 80, head, given)


def mixtral_8x7b(device: Device, sequences: int) -> TableLayers:
    """32 layers of width 4,096 with 8 experts. Each token goes through two of the experts."""
    tokens, width, vocabulary = 32_768, 4096, 32_000
    rows = tokens * sequences
    given = rows * width * WIDE
    block = device.self_attention(rows, tokens, width, 32, 128, 8, causal=True)
    block += device.feed_forward(rows, width, 14_336, gated=True, experts=8, chosen=2)
    block += device.product(rows, width, 8)  # the router
    head = head_of(device, rows, width, vocabulary)
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
        yield block_of(f"layers.{layer}", block, given)
    head = head_of(device, images, width, classes)
    yield replace(head, work=device.passes(rows * width, 1) + head.work)


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
    decoder += device.passes(written * width, 4) + device.product(written, width, inner).divided(whole_input=True)
    decoder += device.product(read, width, 2 * inner).divided(whole_input=True)  # keys and values of the encoder
    decoder += device.attention(written, 512, heads, 128, causal=False).divided()
    decoder += device.product(written, inner, width).divided()
    decoder += device.feed_forward(written, width, hidden, gated=False)
    first, tied = "encoder.embedding", {"tied_to": "encoder.embedding"}
    seen, made = read * width * WIDE, written * width * WIDE
    work = device.embedding(read, width, vocabulary)
    yield TableLayer(name=first, work=work, output_bytes=seen, forward_sums=(seen,))
    for layer in range(24):
        yield block_of(f"encoder.{layer}", encoder, seen)
    second = device.embedding(written, width, vocabulary)
    yield TableLayer(name="decoder.embedding", work=second, output_bytes=made, inputs="-", forward_sums=(made,), **tied)
    before = "decoder.embedding"
    for layer in range(24):
        name = f"decoder.{layer}"
        yield TableLayer(
            name=name,
            work=decoder,
            output_bytes=made,
            inputs=f"{before}|encoder.23",
            forward_sums=(made,) * 3,
            backward_sums=(made, made, seen, made),  # seen: the gradient of the encoder's output
        )
        before = name
    yield head_of(device, written, width, vocabulary, **tied)


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
            sums = (size,) * 3
            yield TableLayer(
                name=self._last, work=work, output_bytes=size, inputs=inputs, forward_sums=sums, backward_sums=sums
            )

    def _transformer(self, tokens: int, width: int) -> Work:
        """Return the work of a block: attention in the image, attention to 77 tokens of text, and a feed-forward."""
        rows, heads = self._images * tokens, width // 64
        work = self._device.self_attention(rows, tokens, width, heads, 64, heads, causal=False)
        work += self._device.passes(rows * width, 4)
        work += self._device.product(rows, width, width).divided(whole_input=True)
        work += self._device.product(77 * self._images, 2048, 2 * width).divided(whole_input=True)
        work += self._device.attention(rows, 77, heads, 64, causal=False).divided()
        work += self._device.product(rows, width, width).divided()
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
        tensor=(1, 2),  # the widths 640 and 1280 have 10 and 20 heads
        batch=2048,
    ),
}


def tables() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each table."""
    for name, model in MODELS.items():
        for kind, host in HOSTS.items():
            yield FOLDER / f"{name}-{kind}.csv", "\n".join(model.lines(host)) + "\n"

"""GPU report: runs all measurements for accelerators, one after another, and writes one report.

    PYTHONPATH=. python benchmarks/gpu_report.py [--parts 2 3] [--device cuda] [--tiny] [--out runs/gpu]

Each command has a limit of at most ten minutes, and all limits together are 45 minutes. A command that fails or runs
out of time does not stop the others. The report (report.md) holds the date, the device, the versions, and each command
with its output, exit code and seconds, and what could not run here. figures.jsonl holds the figures that the scripts
measured, one JSON object a line. Both files are written after each command. The exit code is 0 if all commands
succeeded.

Parts: 0 the environment, 1 tests, 2 steps and memory, 3 plans, 4 messages between processes, 5 other libraries, 6
training. `make gpu ARGS="--parts 2 3"` runs some of them.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch
from measure import machine
from on_device import add_device_options, all_devices, begun

from pipesched.devices.streams import is_accelerator

ROOT = Path(__file__).parents[1]
SHOWN = 60_000  # characters of a command's output in the report
#: Exit code of a command that was stopped at its limit, as `timeout` of the coreutils has it.
OUT_OF_TIME = 124


@dataclass(frozen=True)
class Command:
    """A command of a part: the words after "python", its limit, and the words of a small run.

    ``measures`` states whether the command takes --device, --tiny and --figures.
    """

    words: tuple[str, ...]
    limit_s: int
    tiny: tuple[str, ...] | None = None
    measures: bool = True

    def line(self, device: str, tiny: bool, figures: Path) -> list[str]:
        """Return the words of the command for a device."""
        words = list(self.tiny if tiny and self.tiny else self.words)
        if self.measures:
            words += ["--device", device, "--figures", str(figures), *(["--tiny"] if tiny else [])]
        return words


@dataclass(frozen=True)
class Part:
    """Commands that answer one question."""

    number: int
    title: str
    commands: tuple[Command, ...]


TESTS = ("-m", "pytest", "-q", "tests", "-k", "cuda or stream or device", *(("-n", "4") if find_spec("xdist") else ()))
PARTS = (
    Part(0, "Environment", (Command(("-m", "torch.utils.collect_env"), 60, measures=False),)),
    Part(
        1,
        "Tests of devices",
        (Command(TESTS, 600, tiny=("-m", "pytest", "-q", "tests/repo/test_device_names.py"), measures=False),),
    ),
    Part(
        2,
        "Steps and memory beside a plain loop",
        (
            Command(("benchmarks/gpu.py", "--seconds", "420"), 540, tiny=("benchmarks/gpu.py", "--only", "steps")),
            Command(("benchmarks/gpu_memory.py", "--seconds", "150"), 200),
        ),
    ),
    Part(
        3,
        "Plans: prediction, and the chosen plan beside a sweep",
        (
            Command(("benchmarks/gpu_tune.py", "--seconds", "90"), 200),
            Command(("benchmarks/gpu_tune.py", "--ranks", "2", "--seconds", "60"), 160),
        ),
    ),
    Part(4, "Messages between processes", (Command(("benchmarks/gpu_messages.py", "--limit", "45"), 200),)),
    Part(5, "Other libraries", (Command(("benchmarks/versus_inprocess.py", "--pairs", "15"), 280),)),
    Part(
        6,
        "Training",
        (
            Command(
                ("examples/train_gpt.py", "--steps", "50"),
                100,
                tiny=("examples/train_gpt.py", "--steps", "1"),
                measures=False,
            ),
            Command(("benchmarks/gpu_training.py",), 240),
        ),
    ),
)


@dataclass(frozen=True)
class Result:
    """What a command did."""

    line: str
    code: int
    seconds: float
    limit_s: int
    output: str

    @property
    def summary(self) -> str:
        """The exit code and the seconds."""
        ended = "out of time" if self.code == OUT_OF_TIME else f"exit code {self.code}"
        return f"{ended}, {self.seconds:.1f} s (limit {self.limit_s} s)"

    def markdown(self) -> str:
        """Return the command, the summary and the output as Markdown."""
        return f"    PYTHONPATH=. {self.line}\n\n{self.summary}\n\n```text\n{shortened(self.output)}\n```\n"


def shortened(output: str) -> str:
    """Return an output without its middle, if it is long."""
    plain = output.replace("```", "'''").strip("\n")
    if len(plain) <= SHOWN:
        return plain
    return f"{plain[: SHOWN // 2]}\n[... {len(plain) - SHOWN} characters ...]\n{plain[-SHOWN // 2 :]}"


def run(words: Sequence[str], limit_s: int) -> Result:
    """Run a command of this Python in the repository's root. Its whole process group is stopped at the limit."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    line = " ".join(["python", *(f'"{word}"' if " " in word else word for word in words)])
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = OUT_OF_TIME
        finally:
            end_group(process)
        seconds = time.monotonic() - start_s
        output.seek(0)
        return Result(line, code, seconds, limit_s, output.read())


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End all processes that a command has left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def never_run(device: torch.device) -> Iterator[str]:
    """Yield what the commands cannot try on this machine, with the reason."""
    if not is_accelerator(device):
        yield "everything on an accelerator: the device is a CPU"
    elif len(all_devices(device)) == 1:
        yield (
            "copies between devices, messages and sums of gradients between ranks on several devices (NCCL on CUDA "
            "devices): the machine has one device"
        )
    yield "several machines: the commands use one machine"
    for module, what in (
        ("pytest", "the tests"),
        ("hypothesis", "the tests"),
        ("torchgpipe", "the comparison with torchgpipe"),
        ("fairscale", "the comparison with fairscale"),
        ("transformers", "the Hugging Face model; a GPT written with torch takes its place"),
        ("tqdm", "the demo"),
    ):
        if find_spec(module) is None:
            yield f"{what}: {module} is not installed"


def head(device: torch.device) -> str:
    """Return the beginning of the report: date, device, versions, and the commit of the code."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    missing = "\n".join(f"- {one}" for one in never_run(device))
    return f"# GPU report\n\n- date: {now}\n- device: {device}\n- machine: {machine()}\n- commit: {commit}\n" + (
        f"\n## Never run\n\n{missing}\n"
    )


def chosen(numbers: Iterable[int] | None) -> list[Part]:
    """Return the parts with these numbers, or all parts."""
    return [part for part in PARTS if numbers is None or part.number in numbers]


def write(path: Path, device: torch.device, done: Sequence[tuple[Part, Sequence[Result]]]) -> None:
    """Write the report of the commands that have run so far."""
    table = ["| Part | Command | Result |", "|---|---|---|"]
    table += [f"| {part.number} | `{one.line}` | {one.summary} |" for part, results in done for one in results]
    sections = [
        f"## {part.number}. {part.title}\n\n" + "\n".join(one.markdown() for one in results) for part, results in done
    ]
    path.write_text("\n".join([head(device), "## Summary\n", *table, "", *sections]), encoding="utf-8")


def main() -> int:
    """Run the parts; return 0 if all commands succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = [part.number for part in PARTS]
    parser.add_argument("--parts", type=int, nargs="+", choices=numbers, help="parts to run (default: all)")
    add_device_options(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the report (default: runs/gpu)")
    args = parser.parse_args()
    device = begun(args.device)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    figures = out / "figures.jsonl"
    figures.unlink(missing_ok=True)
    shown = figures.relative_to(ROOT) if figures.is_relative_to(ROOT) else figures
    done: list[tuple[Part, list[Result]]] = []
    for part in chosen(args.parts):
        results: list[Result] = []
        done.append((part, results))
        for command in part.commands:
            results.append(run(command.line(device.type, args.tiny, shown), command.limit_s))
            print(f"part {part.number}: {results[-1].line}: {results[-1].summary}", flush=True)
            write(out / "report.md", device, done)
    print(f"report: {out / 'report.md'}")
    return int(any(result.code for _, results in done for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""What tables on flash cost and save on an accelerator, against all tables in its memory.

    python tools/device_table.py third full --providers cuda --slots 2000 --json report.json
    python tools/device_table.py --make build --providers cuda --json report.json
    python tools/device_table.py --make build --shape small --providers cpu

For each bundle two models take turns on one provider, in processes of their own: one with a row cache
of so many slots in device memory and the tables on flash, one with every row in device memory. Speeds
are medians over the rounds after a first one that does not count, ratios are medians of the rounds'
ratios. Prints markdown; the JSON has everything, with the machine.

Device memory is what the memory plan says (with weights), what was allocated for slots, KV cache and
hidden states (without weights, which onnxruntime allocates), and what NVIDIA's driver says of the
process, where it does. On the CPU, a part of its memory plays the device; there and on Vulkan in
software (tools/software_gpu.py) memory, hit rates and bytes are those of a device, speeds are not.

One generation at a time: this engine has no batches, so there is one batch size, 1.

Without --text, tokens are of the short text inside the package; give ids or a text of the kind that
matters (--text ids.int32) for hit rates that mean something.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
from device_table_inputs import Tables, make_bundles, tokens_of
from make_checkpoint import SHAPES

import stem_edge
from stem_edge import open_bundle
from stem_edge.bundle import Bundle
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.measuring.bench import bench
from stem_edge.measuring.bench_machine import machine
from stem_edge.measuring.figures import BenchReport, Figures, OnDevice
from stem_edge.measuring.gpu import about_accelerator
from stem_edge.progress import show_status
from stem_edge.runtime.loading_cli import add_providers, device_options
from stem_edge.runtime.machine import available_memory

AIM = 0.95  # of the speed with all tables in device memory
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 512, 128, 5
SLOTS_OF_RECORDS, LEAST_SLOTS = 100, 128  # one slot for so many records, and a prompt chunk's
FLASH, RESIDENT = "bundle", "resident"  # subjects of a bench
SPEEDS = (
    "bundle",
    "tables",
    "slots",
    "prefill tok/s",
    "decode tok/s",
    "device MB planned",
    "allocated",
    "by the driver",
    "hits in slots",
    "hits in host tier",
    "rows up a token",
    "bytes up a token",
    "of a prompt",
    "flash bytes a token",
)
RATIOS = (
    "bundle",
    "prefill, flash / resident",
    "decode",
    f"at least {AIM}",
    "device memory down by, planned MB",
    "allocated",
    "by the driver",
    "tables less the cache, MB",
)


@dataclass(frozen=True)
class Compared:
    """One bundle with its tables on flash, and all in device memory."""

    name: str
    report: BenchReport
    tables_nbytes: int  # of all records, as they are on flash
    tables_less_cache: int  # of those that have no slot

    @property
    def flash(self) -> Figures:
        """With tables on flash."""
        return self.report.subjects[FLASH]

    @property
    def resident(self) -> Figures:
        """With tables in device memory."""
        return self.report.subjects[RESIDENT]

    def ratio(self, rate: str) -> float:
        """Flash to resident, the median over the rounds."""
        return next(each.median for each in self.report.ratios if each.rate == rate)

    def saved(self, what: str) -> int | None:
        """Bytes of device memory that flash does without, of a field of OnDevice."""
        values = [getattr(_on_device(each), what) for each in (self.flash, self.resident)]
        return None if None in values else int(values[1] - values[0])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {rate: self.ratio(rate) for rate in ("prefill", "decode", "median_step")}
        saved = {what: self.saved(what) for what in ("planned", "allocated", "driver_says")}
        sizes = {"tables_nbytes": self.tables_nbytes, "tables_less_cache": self.tables_less_cache}
        found = {"name": self.name, "flash_to_resident": ratios, "device_memory_saved": saved}
        return found | sizes | {"report": self.report.to_dict()}


def compare(path: Path, args: argparse.Namespace) -> Compared:
    """Measure one bundle. Raises StemEdgeError."""
    bundle = open_bundle(path)
    layout = bundle.manifest.tables
    if layout is None:
        raise InputError(f"{path}: a dense model has no tables to keep anywhere; give a STEM model")
    slots = min(layout.records, max(LEAST_SLOTS, layout.records // SLOTS_OF_RECORDS))
    slots = slots if args.slots is None else args.slots
    device = device_options(args)
    if device.get("device_memory") is None and device.get("providers") in (None, ["cpu"]):
        device["device_memory"] = available_memory()  # which makes a device of the CPU
    with tempfile.TemporaryDirectory() as folder:
        text, source = _write_text(bundle, args, Path(folder))
        report = bench(
            path,
            text,
            against=[RESIDENT],
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            rounds=args.rounds,
            loads=0,
            context_length=args.context_length,
            threads=args.threads,
            slots=slots,
            **device,
            notify=show_status,
        )
    settings = replace(report.settings, text=source)
    report = replace(report, settings=settings, bundle=path.name)
    nbytes = layout.records * layout.record_nbytes
    less = (layout.records - slots) * layout.record_nbytes
    return Compared(path.name, report, nbytes, less)


def _write_text(bundle: Bundle, args: argparse.Namespace, folder: Path) -> tuple[Path, str]:
    """A file of token ids, long enough for other tokens in each round."""
    rounds = (args.rounds + 1) * (args.prompt_tokens + args.new_tokens)
    ids, source = tokens_of(bundle, args.text, rounds)
    path = folder / "ids.npy"
    np.save(path, ids)
    return path, source


def _on_device(figures: Figures) -> OnDevice:
    if figures.on_device is None:
        raise InputError(
            "this ran on the CPU as on any CPU; name a provider, or give device_memory"
        )
    return figures.on_device


def tables(compared: list[Compared]) -> Iterator[str]:
    """The lines of both tables."""
    yield from _head(SPEEDS)
    for each in compared:
        yield _row([each.name, "flash", *_speeds(each.flash)])
        yield _row([each.name, "resident", *_speeds(each.resident)])
    yield ""
    yield from _head(RATIOS)
    for each in compared:
        prefill, decode = each.ratio("prefill"), each.ratio("decode")
        reached = "yes" if min(prefill, decode) >= AIM else "no"
        saved = [_mb(each.saved(what)) for what in ("planned", "allocated", "driver_says")]
        ratios = [f"{prefill:.3f}", f"{decode:.3f}", reached]
        yield _row([each.name, *ratios, *saved, _mb(each.tables_less_cache)])


def _speeds(figures: Figures) -> Iterator[str]:
    device = _on_device(figures)
    yield f"{device.slots:,}"
    yield f"{figures.prefill_tokens_per_second:.1f}"
    yield f"{figures.decode_tokens_per_second:.2f}"
    for nbytes in (device.planned, device.allocated, device.driver_says):
        yield _mb(nbytes)
    for rate in (figures.hit_rate, device.host_hit_rate):
        yield "" if rate is None else f"{rate:.1%}"
    yield f"{device.uploaded_rows_per_token:.3f}"
    yield f"{device.uploaded_bytes_per_token:,.0f}"
    yield f"{device.uploaded_bytes_per_prompt_token:,.0f}"
    yield f"{figures.flash_bytes_per_token or 0:,.0f}"


def _mb(nbytes: int | None) -> str:
    """Nothing where nobody knows, or where the portable variant keeps nothing on a device."""
    return f"{nbytes / 1e6:,.1f}" if nbytes else ""


def _head(columns: tuple[str, ...]) -> Iterator[str]:
    yield _row(list(columns))
    yield "|---" * len(columns) + "|"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def description(compared: list[Compared]) -> dict[str, str]:
    """The machine, the device and everything else that figures depend on."""
    import onnxruntime

    return {
        "machine": machine(),
        "system": _system(),
        **_on_device(compared[0].flash).about,
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
        "stem-edge": stem_edge.__version__,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def _system() -> str:
    try:
        release = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:  # other systems, and small Linuxes
        release = platform.release()
    return f"{platform.system()} {platform.machine()} {release}".strip()


def headline(about: dict[str, str], compared: list[Compared]) -> Iterator[str]:
    """What the tables are of, in words."""
    settings = compared[0].report.settings
    yield ", ".join(f"{name} {what}" for name, what in about.items()) + "."
    yield (
        f"Prompts of {settings.prompt_tokens} tokens, {settings.new_tokens} steps, "
        f"{settings.rounds} rounds, one generation at a time; {settings.text}."
    )
    if about.get("software") == "yes":
        yield "**The device is software**: its memory, hits and bytes are a device's, speeds are not."


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "--make", type=Path, metavar="FOLDER", help="make STEM-1/3 and STEM-full there first"
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b", help="(llama-3.2-1b)")
    parser.add_argument(
        "--tables", choices=get_args(Tables), default="int8", help="of what is made (int8)"
    )
    add_providers(parser)
    parser.add_argument(
        "--slots", type=int, metavar="N", help=f"(1 %% of the records, at least {LEAST_SLOTS})"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text, or ids (.npy, .int32)")
    for name, default in (("prompt", PROMPT_TOKENS), ("new", NEW_TOKENS)):
        parser.add_argument(
            f"--{name}-tokens", type=int, metavar="N", default=default, help=f"({default})"
        )
    parser.add_argument("--rounds", type=int, metavar="N", default=ROUNDS, help=f"({ROUNDS})")
    parser.add_argument("--context-length", type=int, metavar="N", help="(tokens of a round)")
    parser.add_argument("--threads", type=int, metavar="N", help="(the CPUs it may use)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


def _check(args: argparse.Namespace) -> None:
    """What would be an error after gigabytes were written. Raises InputError, BackendError."""
    about_accelerator(device_options(args)["providers"], device_options(args)["provider_libraries"])
    if args.text is not None and not args.text.is_file():
        raise InputError(f"--text {args.text}: there is no such file")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise InputError(f"--json {args.json}: its folder does not exist")


def main() -> None:
    """See the module."""
    args = make_parser().parse_args()
    try:
        _check(args)
        made = [] if args.make is None else make_bundles(args.make, args.shape, args.tables)
        bundles = [*args.bundles, *made]
        if not bundles:
            raise InputError("no bundle is given; name some, or let --make FOLDER make two")
        compared = [compare(path, args) for path in bundles]
        about = description(compared)
        print("\n".join([*headline(about, compared), "", *tables(compared)]))
        if args.json is not None:
            found = {"about": about, "bundles": [each.to_dict() for each in compared]}
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    except (StemEdgeError, OSError) as error:
        sys.exit(f"device_table: {error}")


if __name__ == "__main__":
    main()

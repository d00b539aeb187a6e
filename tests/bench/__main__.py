"""`python -m tests.bench [--quick] [--strict] [--json FILE] [NAME…]`: one line per figure, on a stack of its own.

A line is `name value unit peer_value`; lines that begin with # say how the machine was and which aims were missed.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from infra.launch.plan import StackOptions
from infra.launch.stack import Stack, running_stack
from infra.redis import connect
from ledger.rebuild import rebuild
from schemas.errors import SwitchyardError
from schemas.topics import Role
from tests.bench import burst, cold, eviction, ledger, pipeline, real, router, versions
from tests.bench.children import REPOSITORY
from tests.bench.figures import AIMS, SECTIONS, Figure, missed
from tests.bench.ledger import Calls
from tests.bench.loads import Load
from tests.bench.machine import watched
from tests.bench.router import Effort
from tests.factories import IN_WORDS

PROMPT = "Say something about the weather in one sentence."
FULL = (Effort(jobs=12_000, rounds=3), Load(prompt=PROMPT, tokens=64, jobs=300, share=0.5, saturating=400))
QUICK = (Effort(jobs=800, rounds=1), Load(prompt=PROMPT, tokens=16, jobs=20, share=0.5, saturating=128))
REAL = Load(prompt=PROMPT, tokens=32, jobs=20, share=0.4, saturating=32)
CALLS, CALLS_QUICK = Calls(calls=8_000, rounds=5), Calls(calls=500, rounds=1)
BURST_S, BURST_QUICK_S = 120.0, 5.0
VERSIONS_S, VERSIONS_QUICK_S = 300.0, 5.0
BEGAN = monotonic()


def say(line: str) -> None:
    print(f"[bench {monotonic() - BEGAN:4.0f}s] {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures to measure; all where none is named")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small numbers, no real engine")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where an aim is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file too")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - AIMS.keys())
    if unknown:
        parser.error(f"no such figure: {', '.join(unknown)}; there are {', '.join(AIMS)}")
    try:
        figures = _on_own_stack(set(options.names or AIMS), options.quick)
    except (SwitchyardError, TimeoutError) as error:
        say(f"stopped: {str(error) or 'something took too long'}")
        return 2
    except KeyboardInterrupt:
        return 130
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    return _conclude(figures, options.strict)


def _on_own_stack(names: set[str], quick: bool) -> list[Figure]:
    """Measure on a stack that is gone afterwards, with its data; only logs of a failure are kept."""
    cache = REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="bench-", dir=cache))
    try:
        with running_stack(StackOptions(home=home, orderly=False, prompts=IN_WORDS), say) as stack:
            return asyncio.run(_measure(stack, names, quick))
    except SwitchyardError:
        shutil.copytree(home / "logs", cache / "bench-logs", dirs_exist_ok=True)
        say(f"the logs are in {cache / 'bench-logs'}")
        raise
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _measure(stack: Stack, names: set[str], quick: bool) -> list[Figure]:
    admin = connect(stack.redis("admin"))
    await rebuild(stack.kafka("admin"), admin)
    await admin.aclose()
    effort, load = QUICK if quick else FULL
    sections = {section for section, figures in SECTIONS.items() if figures.keys() & names}
    if quick or not real.possible():
        sections -= {"real", "cold"}
    found: list[Figure] = []
    if "router" in sections:
        async with watched("router", say):
            figures = await router.measure(stack, effort, say)
        found += _show(figures, names)
    if "ledger" in sections:
        async with watched("ledger", say):
            figures = await ledger.measure(stack, CALLS_QUICK if quick else CALLS, say)
        found += _show(figures, names)
    if "eviction" in sections:
        found += _show(eviction.measure(), names)
    if sections & {"pipeline", "burst", "versions", "cold", "real"}:
        await asyncio.to_thread(stack.start, "router", Role.ROUTER)
        await asyncio.to_thread(stack.start, "settler", Role.SETTLER)
    if "pipeline" in sections:
        async with watched("pipeline", say):
            figures = await pipeline.measure(stack, load, say)
        found += _show(figures, names)
    if "burst" in sections:
        async with watched("burst", say):
            figures = await burst.measure(stack, BURST_QUICK_S if quick else BURST_S, say)
        found += _show(figures, names)
    if "cold" in sections:
        async with watched("cold", say):
            figures = await cold.measure(stack, say)
        found += _show(figures, names)
    if "versions" in sections:
        async with watched("versions", say):
            measured = await versions.measure(stack, VERSIONS_QUICK_S if quick else VERSIONS_S, say)
        found += _show(measured.figures, names)
    if "real" in sections:
        async with watched("real", say):
            figures = await real.measure(stack, REAL, say)
        found += _show(figures, names)
    return found


def _show(figures: list[Figure], names: set[str]) -> list[Figure]:
    wanted = [figure for figure in figures if figure.name in names]
    for figure in wanted:
        print(figure.line, flush=True)
    return wanted


def _conclude(figures: list[Figure], strict: bool) -> int:
    sentences = missed(figures)
    for sentence in sentences:
        print(f"# missed: {sentence}")
    if not sentences:
        print("# no aim was missed")
    return 1 if strict and sentences else 0


if __name__ == "__main__":
    sys.exit(main())

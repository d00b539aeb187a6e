"""`python -m scripts.demo`: start a stack of its own, show what Switchyard does, check it, leave nothing running."""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from infra.launch.plan import StackOptions
from infra.launch.stack import running_stack
from infra.settings import EngineSettings
from schemas.errors import SwitchyardError
from scripts.demo.checks import Checks
from scripts.demo.tour import STEPS, tour

REPOSITORY = Path(__file__).parents[2]
BASE = REPOSITORY / ".cache/base/smollm2-135m-instruct"
ENGINE = EngineSettings(kind="vllm", base=BASE, slots=3, rows=8, rank_max=8, context_max=512, kv_bytes=128 << 20)


def main() -> int:
    console = Console(highlight=False)
    checks = Checks(console=console, steps=STEPS)
    cache = REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="demo-", dir=cache))
    options = StackOptions(
        home=home,
        router=True,
        settler=True,
        gate=True,
        workers=1,
        engine=ENGINE,
        # A new stack has no base model yet: the engines start while it is added.
        engines_awaited=False,
    )
    console.print("[bold]Switchyard[/]: two tenants, four adapters, one base; every answer under a digest.")
    checks.step("A stack: Kafka, Redis, router, settler, gate, worker")
    try:
        with running_stack(options, say=lambda line: console.print(f"   {line}", style="dim")) as stack:
            asyncio.run(tour(stack, checks))
    except (SwitchyardError, TimeoutError) as error:
        console.print(f"\n[bold red]The demo stopped[/]: {str(error) or 'something took too long'}")
        console.print(f"Logs: {home / 'logs'}")
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped; nothing is left running.")
        shutil.rmtree(home, ignore_errors=True)
        return 130
    console.print()
    console.print(checks.summary())
    if checks.failed:
        console.print(f"[bold red]{checks.failed} not as it should be.[/] Logs: {home / 'logs'}")
        return 1
    console.print("[green]All as it should be.[/] Nothing is left running. A stack that stays: make up")
    shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Two tenants' batch files at once, with a progress bar each."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from infra.clock import SystemClock
from infra.launch.stack import Stack
from producers.batch import BatchRun, open_batch
from producers.batch_files import Input, Results
from scripts.demo.checks import Checks

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH_S = 300.0


async def run_batches(
    stack: Stack, markers: Mapping[tuple[str, str], str], digests: Mapping[tuple[str, str], str], checks: Checks
) -> None:
    """Run both files and compare every answer with what was asked for."""
    checks.step("A batch file of each tenant, at the same time")
    tenants = sorted({tenant for tenant, _ in digests})
    columns = (TextColumn("   {task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=checks.console) as progress:
        async with asyncio.timeout(BATCH_S):
            outputs = await asyncio.gather(*(_run(stack, tenant, progress) for tenant in tenants))
    for tenant, (asked, answered) in zip(tenants, outputs, strict=True):
        wrong = [name for name, text in answered.items() if not text.lstrip().startswith(markers[tenant, asked[name]])]
        for name in sorted(answered)[:2]:
            checks.console.print(f"   {name} ({asked[name]}): {' '.join(answered[name].split())[:90]}", markup=False)
        whole = answered.keys() == asked.keys()
        saw = f"{len(answered)} of {len(asked)} answered" + (f", wrong: {wrong}" if wrong else ", each with its marker")
        checks.check(f"{tenant}'s batch: every line once, under its own adapter", whole and not wrong, saw)


async def _run(stack: Stack, tenant: str, progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
    """What was asked (custom id to alias) and what came (custom id to text)."""
    source = EXAMPLES / f"prompts-{tenant}.jsonl"
    out, errors = (stack.file.home / f"{tenant}-{kind}.jsonl" for kind in ("out", "errors"))
    found = await asyncio.to_thread(Input.scan, source)
    settings = stack.kafka(tenant)
    state = await open_batch(settings, tenant, found, out, errors)
    results = Results(out, errors, state)
    bar = progress.add_task(tenant, total=found.lines)
    run = BatchRun(
        settings, SystemClock(), found, state, results, lambda: progress.update(bar, completed=len(results.done))
    )
    try:
        await run.run()
    finally:
        results.close()
    asked = {line["custom_id"]: line["body"]["model"] for line in map(json.loads, source.read_text().splitlines())}
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    answered = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    return asked, answered

"""What the demo shows, checked: a step that did not go as it should makes the demo fail."""

from dataclasses import dataclass, field
from time import monotonic

from rich.console import Console
from rich.table import Table


@dataclass(kw_only=True)
class Checks:
    """Steps and their checks, in order."""

    console: Console
    steps: int
    _step: int = 0
    _began: float = field(default_factory=monotonic)
    _rows: list[tuple[str, bool, str]] = field(default_factory=list)

    def step(self, title: str) -> None:
        self._step += 1
        passed = monotonic() - self._began
        self.console.print(f"\n[bold cyan]{self._step}/{self.steps}  {title}[/] [dim]{passed:.0f} s[/]")

    def check(self, what: str, ok: bool, saw: str) -> None:
        self._rows.append((what, ok, saw))
        if not ok:
            self.console.print(f"   [bold red]not as it should be[/]: {what}: {saw}")

    @property
    def failed(self) -> int:
        return sum(not ok for _, ok, _ in self._rows)

    def summary(self) -> Table:
        table = Table(title="What was shown", title_justify="left")
        table.add_column("")
        table.add_column("claim")
        table.add_column("seen")
        for what, ok, saw in self._rows:
            table.add_row("[green]ok[/]" if ok else "[red]NO[/]", what, saw)
        return table

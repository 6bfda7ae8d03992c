"""How `hf-dflash doctor` shows what it found."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .doctor import FAULTY, LOADS, Examination, Verdict
from .doctor_facts import FAULT

_STYLES = {LOADS: "green", FAULTY: "bold red"}


def show(examination: Examination, console: Console) -> None:
    """Print one row for each engine, then the commands to serve the drafter with."""
    table = Table(title=f"{examination.path}: format {examination.format}", title_justify="left")
    table.add_column("engine", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("why, and what to do", overflow="fold")
    for verdict in examination.verdicts:
        style = _STYLES.get(verdict.state, "dim")
        table.add_row(verdict.engine, f"[{style}]{verdict.state}[/]", _reasons(verdict))
    console.print(table)
    for engine, command in examination.commands.items():
        console.print(f"\n[bold]{engine}[/]")
        console.print(command, markup=False, highlight=False, soft_wrap=True)


def _reasons(verdict: Verdict) -> str:
    if verdict.reason:
        return escape(f"{verdict.reason}. {verdict.remedy}")
    lines = []
    for finding in verdict.findings:
        mark = "[red]x[/]" if finding.severity == FAULT else "[yellow]![/]"
        lines.append(f"{mark} {escape(f'{finding.subject}: {finding.reason}. {finding.remedy}')}")
    return "\n".join(lines)

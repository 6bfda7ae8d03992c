"""How `hf-dflash doctor` shows what it found."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .doctor import FAULTY, LOADS, Examination, Verdict
from .doctor_facts import FAULT

_STYLES = {LOADS: "green", FAULTY: "bold red"}


def show(examination: Examination, console: Console) -> None:
    """Print one row for engines that say the same, then the commands to serve the drafter with."""
    table = Table(title=f"{examination.path}: format {examination.format}", title_justify="left")
    table.add_column("engine", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("why, and what to do", overflow="fold")
    told: dict[str, str] = {}
    for engines, verdict in _grouped(examination.verdicts):
        style = _STYLES.get(verdict.state, "dim")
        reasons = _reasons(verdict, told)
        table.add_row("\n".join(engines), f"[{style}]{verdict.state}[/]", reasons)
    console.print(table)
    for engine, command in examination.commands.items():
        console.print(f"\n[bold]{engine}[/]")
        console.print(command, markup=False, highlight=False, soft_wrap=True)


def _grouped(verdicts: Sequence[Verdict]) -> list[tuple[list[str], Verdict]]:
    """Engines whose verdicts say the same, each group once, at its first engine's place."""
    groups: dict[str, tuple[list[str], Verdict]] = {}
    for verdict in verdicts:
        said = _reasons(verdict, {})
        # Those that have nothing to say keep a row of their own.
        key = f"{verdict.state}\n{said}" if said else verdict.engine
        groups.setdefault(key, ([], verdict))[0].append(verdict.engine)
    return list(groups.values())


def _reasons(verdict: Verdict, told: dict[str, str]) -> str:
    """Why, and what to do; a finding that was ``told`` for another engine is told by its subject.

    Args:
        verdict: Of an engine.
        told: The engine that each finding was told for; what is told now is added.
    """
    if verdict.reason:
        return escape(f"{verdict.reason}. {verdict.remedy}")
    lines = []
    for finding in verdict.findings:
        mark = "[red]x[/]" if finding.severity == FAULT else "[yellow]![/]"
        text = f"{finding.subject}: {finding.reason.rstrip('.')}. {finding.remedy}"
        first = told.setdefault(text, verdict.engine)
        if first != verdict.engine:
            text = f"{finding.subject}: as for {first}."
        lines.append(f"{mark} {escape(text)}")
    return "\n".join(lines)
